//! Runs the random requests of a seed to their end, with the real scheduler, a real executor on this thread,
//! and injected faults.

use super::generated_requests::GeneratedRequest;
use crate::invariance::{
    EngineTestConfig, MAX_MODEL_LEN, draft_bitmasks, drafts_of, executor, kv_config, model,
};
use crate::rng::SimRng;
use executor::{Executor, ExecutorError, TokenBitmaskSource};
use grammar::{CompiledGrammar, GrammarSession};
use protocol::{
    Batch, BitmaskRow, Replica, RequestId, StateSlotAccess, StepDrafts, StepId, StepOutput, Token,
    TokenBitmask, TokenLogprobs,
};
use scheduler::{
    AbortCause, ExecutorFailure, FinishReason, Scheduler, SchedulerConfig, SchedulerEffect,
    SchedulerEvent, SchedulerLimits, TokenEvent,
};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Add;

/// Maximum number of ticks (iterations of the scheduler loop) of a run, far more than any set of random
/// requests needs.
const TICKS_MAX: u64 = 50_000;
/// Number of ticks (iterations of the scheduler loop) from an executor's failure until its replacement
/// starts.
const DEAD_TICKS: u64 = 3;

/// Faults injected into a run; rates are per 1000.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct MixFaultRates {
    /// Rate (per 1000) of grammar bitmasks that are overdue (not ready when the sampler needs them).
    pub(super) overdue_masks: u32,
    /// Rate (per 1000) of step outputs that reach the scheduler one tick late.
    pub(super) delayed_outputs: u32,
    pub(super) dies_at_tick: Option<u64>,
}

/// Scheduler limits and fault rates of one run of random requests (a mix).
#[derive(Debug, Clone, Copy)]
pub(super) struct MixConfig {
    pub(super) setting: EngineTestConfig,
    pub(super) tokens_per_chunk: Option<u32>,
    pub(super) mixed: bool,
    pub(super) faults: MixFaultRates,
}

/// All that a client has received for one request: tokens, log-probabilities and finish reason.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct RequestOutput {
    pub(super) tokens: Vec<Token>,
    pub(super) logprobs: Vec<TokenLogprobs>,
    pub(super) prompt_logprobs: Vec<TokenLogprobs>,
    pub(super) finish: Option<FinishReason>,
}

/// Counts of requests and faults in a run.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct MixCounts {
    pub(super) requests: u64,
    pub(super) tokens: u64,
    pub(super) steps: u64,
    pub(super) preemptions: u64,
    pub(super) cached_tokens: u64,
    /// Number of rows that wrote another state slot than the one that they read.
    pub(super) forks: u64,
    pub(super) accepted: u64,
    /// Number of clients that disconnected before the end.
    pub(super) disconnects: u64,
    pub(super) executor_failures: u64,
    pub(super) overdue_masks: u64,
    pub(super) masked: u64,
    /// Number of requests that ended before their maximum number of tokens.
    pub(super) ended_early: u64,
    pub(super) scored: u64,
}

impl Add for MixCounts {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            requests: self.requests + other.requests,
            tokens: self.tokens + other.tokens,
            steps: self.steps + other.steps,
            preemptions: self.preemptions + other.preemptions,
            cached_tokens: self.cached_tokens + other.cached_tokens,
            forks: self.forks + other.forks,
            accepted: self.accepted + other.accepted,
            disconnects: self.disconnects + other.disconnects,
            executor_failures: self.executor_failures + other.executor_failures,
            overdue_masks: self.overdue_masks + other.overdue_masks,
            masked: self.masked + other.masked,
            ended_early: self.ended_early + other.ended_early,
            scored: self.scored + other.scored,
        }
    }
}

/// Builds the grammar bitmasks of a step's rows from the requests' output tokens.
struct MixBitmaskBuilder<'a> {
    requests: &'a [GeneratedRequest],
    grammars: &'a [CompiledGrammar],
    sessions: BTreeMap<RequestId, GrammarSession>,
    /// Masked rows of the step: row index, request, and whether the bitmask is overdue.
    masked_rows: Vec<(u32, RequestId, bool)>,
    outputs: BTreeMap<RequestId, Vec<Token>>,
    drafts: Option<StepDrafts>,
}

impl<'a> MixBitmaskBuilder<'a> {
    /// Grammar session of a constrained request.
    fn session(&mut self, request: RequestId) -> Option<&mut GrammarSession> {
        let grammar: &'a CompiledGrammar =
            &self.grammars[self.requests[request.0 as usize].grammar?];
        let new = || grammar.session_seed(false).session();
        Some(self.sessions.entry(request).or_insert_with(new))
    }

    /// Bitmasks of a request's next token, and of the tokens after its allowed draft tokens.
    fn bitmasks(&mut self, request: RequestId, drafts: &[Token]) -> Vec<TokenBitmask> {
        let session = self.session(request).expect("only constrained requests are masked");
        let first = session.mask();
        let asked = &self.requests[request.0 as usize];
        let output = self.outputs.get(&request).map_or(&[][..], Vec::as_slice);
        let first = first.unwrap_or_else(|| panic!("no mask after {output:?} of {asked:?}"));
        let mut bitmasks = vec![first.into()];
        if let Some(grammar) = asked.grammar.filter(|_| !drafts.is_empty()) {
            let from = asked.submit.first_masked_token.unwrap_or(0) as usize;
            let seed = self.grammars[grammar].session_seed(false);
            bitmasks.extend(draft_bitmasks(&seed, &output[from..], drafts));
        }
        bitmasks
    }

    /// Advances a request's grammar session by `tokens`, which follow `before` earlier output tokens.
    fn observe(&mut self, request: RequestId, before: usize, tokens: &[Token]) {
        let from =
            self.requests[request.0 as usize].submit.first_masked_token.unwrap_or(0) as usize;
        self.outputs.entry(request).or_default().extend(tokens);
        let free = from.saturating_sub(before).min(tokens.len());
        if let Some(session) = self.session(request) {
            session.advance(&tokens[free..]);
        }
    }
}

impl TokenBitmaskSource for MixBitmaskBuilder<'_> {
    fn report_drafts(&mut self, drafts: StepDrafts) -> Result<(), ExecutorError> {
        self.drafts = Some(drafts);
        Ok(())
    }

    fn wait(&mut self, step: StepId, rows: usize) -> Result<Vec<BitmaskRow>, ExecutorError> {
        assert_eq!(self.masked_rows.len(), rows);
        let wanted = std::mem::take(&mut self.masked_rows);
        let reported = self.drafts.take().filter(|drafts| drafts.step == step);
        let mask = |(row, request, late): (u32, RequestId, bool)| {
            if late {
                return BitmaskRow { row, bitmasks: Vec::new() };
            }
            let drafts = drafts_of(reported.as_ref(), request);
            BitmaskRow { row, bitmasks: self.bitmasks(request, &drafts) }
        };
        Ok(wanted.into_iter().map(mask).collect())
    }
}

/// State of a run: scheduler, executor, steps in flight, and the outputs so far.
struct MixRun<'a> {
    requests: &'a [GeneratedRequest],
    mix: &'a MixConfig,
    rng: &'a mut SimRng,
    engine: Scheduler,
    executor: Option<Executor>,
    maker: MixBitmaskBuilder<'a>,
    inbox: Vec<SchedulerEvent>,
    /// Step outputs that have not reached the scheduler yet.
    step_outputs: VecDeque<StepOutput>,
    /// Overdue bitmasks, identified by the request and the number of preceding output tokens, each with the
    /// tick at which it is ready.
    overdue_masks: BTreeMap<(RequestId, usize), u64>,
    outputs: Vec<RequestOutput>,
    counts: MixCounts,
}

/// Runs requests to their end with the scheduler limits and faults of a mix; returns their outputs and the
/// event counts.
pub(super) fn run(
    asked: &[GeneratedRequest],
    mix: &MixConfig,
    grammars: &[CompiledGrammar],
    rng: &mut SimRng,
) -> (Vec<RequestOutput>, MixCounts) {
    let world = mix.setting;
    let limits = SchedulerLimits {
        tokens_per_step: world.tokens_per_step,
        max_num_seqs: world.requests_running,
        steps_in_flight: world.steps_in_flight,
        tokens_per_chunk: mix.tokens_per_chunk,
        mixed_batches: mix.mixed,
        draft_tokens: world.drafts,
        needs_token_history: world.drafts > 0 && !world.uses_draft_model,
        state_checkpoint_tokens: world.state_checkpoint_tokens,
        ..SchedulerLimits::cpu(MAX_MODEL_LEN, model().vocab as u32)
    };
    let first = executor(world, protocol::Epoch(1));
    let kv = kv_config(world, &first);
    let mut run = MixRun {
        requests: asked,
        mix,
        rng,
        engine: Scheduler::new(SchedulerConfig::new(limits, kv)).unwrap(),
        executor: Some(first),
        maker: MixBitmaskBuilder {
            requests: asked,
            grammars,
            sessions: BTreeMap::new(),
            masked_rows: Vec::new(),
            outputs: BTreeMap::new(),
            drafts: None,
        },
        inbox: Vec::new(),
        step_outputs: VecDeque::new(),
        overdue_masks: BTreeMap::new(),
        outputs: vec![RequestOutput::default(); asked.len()],
        counts: MixCounts { requests: asked.len() as u64, ..MixCounts::default() },
    };
    for tick in 0.. {
        assert!(tick < TICKS_MAX, "no end: {:?}", run.outputs);
        run.tick(tick);
        let last = asked.last().is_none_or(|asked| asked.at_tick <= tick);
        if last && run.outputs.iter().all(|received| received.finish.is_some()) {
            break;
        }
    }
    (run.outputs, run.counts)
}

impl MixRun<'_> {
    fn tick(&mut self, tick: u64) {
        for asked in self.requests {
            let id = asked.submit.id;
            if asked.at_tick == tick {
                self.inbox.push(SchedulerEvent::Submit(Box::new(asked.submit.clone())));
            }
            if asked.disconnects_at_tick == Some(tick) {
                self.inbox.push(SchedulerEvent::Abort {
                    request: id,
                    cause: AbortCause::ClientDisconnected,
                });
            }
        }
        self.kill_and_restart(tick);
        while let Some(output) = self.step_outputs.pop_front() {
            self.inbox.push(SchedulerEvent::StepOutput { replica: Replica(0), output });
            if self.rng.chance_per_mille(self.mix.faults.delayed_outputs) {
                break;
            }
        }
        for (&(request, outputs), _) in
            self.overdue_masks.iter().filter(|(_, made_at)| **made_at == tick)
        {
            let outputs = outputs as u32;
            self.inbox.push(SchedulerEvent::MaskReady {
                request,
                output_tokens: outputs,
                wait_for_next: false,
            });
        }
        let mut effects = Vec::new();
        self.engine.tick(tick, &mut self.inbox, &mut effects);
        for effect in &effects {
            if let SchedulerEffect::TokenEvents(events) = effect {
                for event in events {
                    self.observe(event);
                }
            }
        }
        for effect in effects {
            match effect {
                SchedulerEffect::SendBatch { batch, .. } => self.step(&batch, tick),
                SchedulerEffect::Stats(stats) => {
                    self.counts.accepted = stats.drafts_total.accepted_per_position.iter().sum();
                }
                _ => {}
            }
        }
    }

    /// Stops the executor at tick `dies_at_tick`, and starts its replacement `DEAD_TICKS` ticks later.
    fn kill_and_restart(&mut self, tick: u64) {
        let Some(dies) = self.mix.faults.dies_at_tick else { return };
        if tick == dies {
            self.counts.executor_failures += 1;
            self.executor = None;
            self.step_outputs.clear();
            self.inbox.push(SchedulerEvent::ExecutorsFailed {
                replica: Replica(0),
                failure: ExecutorFailure::Exited,
            });
        } else if tick == dies + DEAD_TICKS {
            self.executor = Some(executor(self.mix.setting, self.engine.epoch(Replica(0))));
            let (replica, blocks) = (Replica(0), self.mix.setting.blocks);
            self.inbox.push(SchedulerEvent::ExecutorsReady {
                replica,
                blocks,
                capture_sizes: Vec::new(),
            });
        }
    }

    fn step(&mut self, batch: &Batch, tick: u64) {
        self.counts.steps += 1;
        let forks = |slots: &StateSlotAccess| slots.read.is_some_and(|read| read != slots.write);
        let rows = batch.rows.iter().filter(|row| row.state_slots.iter().any(forks));
        self.counts.forks += rows.count() as u64;
        let masked = (0..).zip(&batch.rows).filter(|(_, row)| row.masked);
        for (index, row) in masked {
            let late = self.is_mask_overdue(row.request, tick);
            self.maker.masked_rows.push((index, row.request, late));
            self.counts.masked += 1;
        }
        let executor = self.executor.as_mut().expect("nothing is sent to the dead");
        let step = executor.submit_with_bitmasks(batch, &mut self.maker).unwrap();
        self.step_outputs.push_back(step.finish().unwrap());
    }

    /// Whether the bitmask for a request's next output token is overdue for a step that is sent now. Once
    /// reported as ready, the bitmask stays ready.
    fn is_mask_overdue(&mut self, request: RequestId, tick: u64) -> bool {
        let outputs = self.outputs[request.0 as usize].tokens.len();
        let known = self.overdue_masks.get(&(request, outputs));
        if known.is_none() && self.rng.chance_per_mille(self.mix.faults.overdue_masks) {
            self.counts.overdue_masks += 1;
            self.overdue_masks.insert((request, outputs), tick + 1 + self.rng.below(4));
            return true;
        }
        known.is_some_and(|made_at| *made_at > tick)
    }

    fn observe(&mut self, event: &TokenEvent) {
        let received = &mut self.outputs[event.request.0 as usize];
        assert_eq!(received.finish, None, "nothing follows an end: {event:?}");
        self.maker.observe(event.request, received.tokens.len(), &event.tokens);
        received.tokens.extend(&event.tokens);
        received.logprobs.extend(event.logprobs.iter().cloned());
        received.prompt_logprobs.extend(event.prompt_logprobs().iter().cloned());
        received.finish.clone_from(&event.finish_reason);
        let cached = event.first_admission.map_or(0, |run| run.cached_tokens);
        let met = &mut self.counts;
        met.cached_tokens += u64::from(cached);
        met.tokens += event.tokens.len() as u64;
        met.scored += event.prompt_logprobs().len() as u64;
        if let Some(finish) = &event.finish_reason {
            met.preemptions += u64::from(event.preemptions);
            met.disconnects += u64::from(matches!(finish, FinishReason::Abort(_)));
            met.ended_early += u64::from(matches!(finish, FinishReason::Stop(_)));
        }
    }
}
