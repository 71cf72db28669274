//! Runs requests to their end: the real engine, a real executor on this thread, and what befalls them.

use super::asked::Asked;
use crate::chance::Chance;
use crate::invariance::{MAX_MODEL_LEN, World, executor, model};
use executor::{Executor, ExecutorError, Masks};
use hadron::grammar::{Compiled, Session};
use protocol::{Batch, MaskRow, Replica, RequestId, StepId, StepOutput, Token, TokenLogprobs};
use scheduler::{
    AbortCause, Effect, Engine, EngineConfig, Event, Finish, KvConfig, Limits, Loss, TokenEvent,
};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Add;

/// Far more than any mix needs.
const TICKS_MAX: u64 = 50_000;
/// From the death of an executor to the next one.
const DEAD_TICKS: u64 = 3;

/// What goes wrong, in 1000.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Faults {
    /// Masks that are late.
    pub(super) late: u32,
    /// Answers that come a tick later.
    pub(super) hold: u32,
    pub(super) dies_at_tick: Option<u64>,
}

/// How requests run.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mix {
    pub(super) world: World,
    pub(super) tokens_per_chunk: Option<u32>,
    pub(super) mixed: bool,
    pub(super) faults: Faults,
}

/// What somebody who asks hears.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Heard {
    pub(super) tokens: Vec<Token>,
    pub(super) logprobs: Vec<TokenLogprobs>,
    pub(super) prompt_logprobs: Vec<TokenLogprobs>,
    pub(super) finish: Option<Finish>,
}

/// What happened on the way.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Met {
    pub(super) requests: u64,
    pub(super) tokens: u64,
    pub(super) steps: u64,
    pub(super) preemptions: u64,
    pub(super) cached_tokens: u64,
    pub(super) accepted: u64,
    /// Clients that left before the end.
    pub(super) gone: u64,
    pub(super) deaths: u64,
    pub(super) late: u64,
    pub(super) masked: u64,
    /// Requests that ended before they had all their tokens.
    pub(super) ended_early: u64,
    pub(super) scored: u64,
}

impl Add for Met {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            requests: self.requests + other.requests,
            tokens: self.tokens + other.tokens,
            steps: self.steps + other.steps,
            preemptions: self.preemptions + other.preemptions,
            cached_tokens: self.cached_tokens + other.cached_tokens,
            accepted: self.accepted + other.accepted,
            gone: self.gone + other.gone,
            deaths: self.deaths + other.deaths,
            late: self.late + other.late,
            masked: self.masked + other.masked,
            ended_early: self.ended_early + other.ended_early,
            scored: self.scored + other.scored,
        }
    }
}

/// Who makes the masks of a step.
struct Maker<'a> {
    asked: &'a [Asked],
    grammars: &'a [Compiled],
    sessions: BTreeMap<RequestId, Session>,
    /// Rows of the step to be masked, and whose masks come too late.
    wanted: Vec<(u32, RequestId, bool)>,
    heard: BTreeMap<RequestId, Vec<Token>>,
}

impl<'a> Maker<'a> {
    /// The session of a request that follows a grammar.
    fn session(&mut self, request: RequestId) -> Option<&mut Session> {
        let grammar: &'a Compiled = &self.grammars[self.asked[request.0 as usize].grammar?];
        let new = || grammar.seed(false).session();
        Some(self.sessions.entry(request).or_insert_with(new))
    }

    /// Tokens behind `before` others.
    fn hear(&mut self, request: RequestId, before: usize, tokens: &[Token]) {
        let from = self.asked[request.0 as usize].submit.masked_from.unwrap_or(0) as usize;
        self.heard.entry(request).or_default().extend(tokens);
        let free = from.saturating_sub(before).min(tokens.len());
        if let Some(session) = self.session(request) {
            session.advance(&tokens[free..]);
        }
    }
}

impl Masks for Maker<'_> {
    fn wait(&mut self, _: StepId, rows: usize) -> Result<Vec<MaskRow>, ExecutorError> {
        assert_eq!(self.wanted.len(), rows);
        let wanted = std::mem::take(&mut self.wanted);
        let mask = |(row, request, late): (u32, RequestId, bool)| {
            let session = self.session(request).expect("only who has a grammar is masked");
            let mask = if late { Some(Vec::new()) } else { session.mask() };
            let allowed = mask.unwrap_or_else(|| {
                let (asked, heard) = (&self.asked[request.0 as usize], &self.heard);
                panic!("no mask behind {:?} of {asked:?}", heard.get(&request))
            });
            MaskRow { row, allowed, late }
        };
        Ok(wanted.into_iter().map(mask).collect())
    }
}

/// The state of one run.
struct Run<'a> {
    asked: &'a [Asked],
    mix: &'a Mix,
    chance: &'a mut Chance,
    engine: Engine,
    executor: Option<Executor>,
    maker: Maker<'a>,
    inbox: Vec<Event>,
    /// Answers under way.
    answers: VecDeque<StepOutput>,
    /// Masks that were late, named by the tokens in front of them, and the tick at which they are there.
    late: BTreeMap<(RequestId, usize), u64>,
    heard: Vec<Heard>,
    met: Met,
}

/// Runs requests in a mix to their end.
pub(super) fn run(
    asked: &[Asked],
    mix: &Mix,
    grammars: &[Compiled],
    chance: &mut Chance,
) -> (Vec<Heard>, Met) {
    let world = mix.world;
    let limits = Limits {
        tokens_per_step: world.tokens_per_step,
        requests_running: world.requests_running,
        steps_in_flight: world.steps_in_flight,
        tokens_per_chunk: mix.tokens_per_chunk,
        mixed: mix.mixed,
        drafts: world.drafts,
        histories: world.drafts > 0 && !world.itself,
        ..Limits::cpu(MAX_MODEL_LEN, model().vocab as u32)
    };
    let first = executor(world, protocol::Epoch(1));
    let mut kv = KvConfig::new(first.kv_spec().clone(), world.blocks, [1, 2]);
    kv.caching = world.caching;
    let mut run = Run {
        asked,
        mix,
        chance,
        engine: Engine::new(EngineConfig::new(limits, kv)).unwrap(),
        executor: Some(first),
        maker: Maker {
            asked,
            grammars,
            sessions: BTreeMap::new(),
            wanted: Vec::new(),
            heard: BTreeMap::new(),
        },
        inbox: Vec::new(),
        answers: VecDeque::new(),
        late: BTreeMap::new(),
        heard: vec![Heard::default(); asked.len()],
        met: Met { requests: asked.len() as u64, ..Met::default() },
    };
    for tick in 0.. {
        assert!(tick < TICKS_MAX, "no end: {:?}", run.heard);
        run.tick(tick);
        let last = asked.last().is_none_or(|asked| asked.at_tick <= tick);
        if last && run.heard.iter().all(|heard| heard.finish.is_some()) {
            break;
        }
    }
    (run.heard, run.met)
}

impl Run<'_> {
    fn tick(&mut self, tick: u64) {
        for asked in self.asked {
            let id = asked.submit.id;
            if asked.at_tick == tick {
                self.inbox.push(Event::Submit(Box::new(asked.submit.clone())));
            }
            if asked.gone_at_tick == Some(tick) {
                self.inbox.push(Event::Abort { request: id, cause: AbortCause::ClientGone });
            }
        }
        self.live_and_die(tick);
        while let Some(output) = self.answers.pop_front() {
            self.inbox.push(Event::Output { replica: Replica(0), output });
            if self.chance.hits(self.mix.faults.hold) {
                break;
            }
        }
        for (&(request, outputs), _) in self.late.iter().filter(|(_, made_at)| **made_at == tick) {
            let outputs = outputs as u32;
            self.inbox.push(Event::MaskMade { request, outputs, ahead: false });
        }
        let mut effects = Vec::new();
        self.engine.tick(tick, &mut self.inbox, &mut effects);
        for effect in &effects {
            if let Effect::Tokens(events) = effect {
                for event in events {
                    self.hear(event);
                }
            }
        }
        for effect in effects {
            match effect {
                Effect::Send { batch, .. } => self.step(&batch, tick),
                Effect::Stats(stats) => {
                    self.met.accepted = stats.drafts_total.accepted.iter().sum();
                }
                _ => {}
            }
        }
    }

    /// The executor dies in its tick, and another one follows.
    fn live_and_die(&mut self, tick: u64) {
        let Some(dies) = self.mix.faults.dies_at_tick else { return };
        if tick == dies {
            self.met.deaths += 1;
            self.executor = None;
            self.answers.clear();
            self.inbox.push(Event::Lost { replica: Replica(0), loss: Loss::Exited });
        } else if tick == dies + DEAD_TICKS {
            self.executor = Some(executor(self.mix.world, self.engine.epoch(Replica(0))));
            let (replica, blocks) = (Replica(0), self.mix.world.blocks);
            self.inbox.push(Event::Ready { replica, blocks, graph_rows: Vec::new() });
        }
    }

    fn step(&mut self, batch: &Batch, tick: u64) {
        self.met.steps += 1;
        let masked = (0..).zip(&batch.rows).filter(|(_, row)| row.masked);
        for (index, row) in masked {
            let late = self.is_late(row.request, tick);
            self.maker.wanted.push((index, row.request, late));
            self.met.masked += 1;
        }
        let executor = self.executor.as_mut().expect("nothing is sent to the dead");
        let step = executor.submit_masked(batch, &mut self.maker).unwrap();
        self.answers.push_back(step.finish().unwrap());
    }

    /// Whether a mask comes too late for a step that is sent now. Once it is said to be there, it is.
    fn is_late(&mut self, request: RequestId, tick: u64) -> bool {
        let outputs = self.heard[request.0 as usize].tokens.len();
        let known = self.late.get(&(request, outputs));
        if known.is_none() && self.chance.hits(self.mix.faults.late) {
            self.met.late += 1;
            self.late.insert((request, outputs), tick + 1 + self.chance.below(4));
            return true;
        }
        known.is_some_and(|made_at| *made_at > tick)
    }

    fn hear(&mut self, event: &TokenEvent) {
        let heard = &mut self.heard[event.request.0 as usize];
        assert_eq!(heard.finish, None, "nothing follows an end: {event:?}");
        self.maker.hear(event.request, heard.tokens.len(), &event.tokens);
        heard.tokens.extend(&event.tokens);
        heard.logprobs.extend(event.logprobs.iter().cloned());
        heard.prompt_logprobs.extend(event.prompt_logprobs.iter().cloned());
        heard.finish.clone_from(&event.finish);
        let cached = event.first_run.map_or(0, |run| run.cached_tokens);
        let met = &mut self.met;
        met.cached_tokens += u64::from(cached);
        met.tokens += event.tokens.len() as u64;
        met.scored += event.prompt_logprobs.len() as u64;
        if let Some(finish) = &event.finish {
            met.preemptions += u64::from(event.preemptions);
            met.gone += u64::from(matches!(finish, Finish::Abort(_)));
            met.ended_early += u64::from(matches!(finish, Finish::Stop(_)));
        }
    }
}
