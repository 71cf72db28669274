//! Mask session of a live request: computes the bitmasks ("masks") of its output from its decoding guide, and
//! measures whether they are fast enough to be computed during a step.
//!
//! Commands wait in an inbox until a worker thread runs the session; at most one thread runs it at a time.
//! The mask of the next token is computed as soon as the tokens before it are committed.

use super::decoding_guide::{DecodingGuide, DecodingGuideState};
use super::limits::{
    FAST_MASKS_TO_RECOVER, MASK_BUDGET, MASK_BUDGET_PER_TOKEN, MASK_FAST, MASK_SLOW, MASK_TIME,
};
use super::step_mask_collector::StepMaskCollector;
use super::timings::{GrammarTimings, thread_cpu_time};
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Mutex, lock};
use protocol::{RequestId, Token, TokenVec};
use std::mem::take;
use std::sync::{Arc, atomic};
use std::time::{Duration, Instant};

/// Callback for mask events, which the scheduler needs for planning.
pub(super) type MaskEventListener = Arc<dyn Fn(RequestId, MaskEvent) + Send + Sync>;

/// Event about the masks of a request, for the scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MaskEvent {
    /// A mask is ready that a step did not wait for, or that was precomputed.
    Ready {
        /// Number of output tokens before the token that the mask restricts.
        output_tokens: u32,
        /// Whether the next mask will be precomputed: the scheduler then plans the next token only after its
        /// mask is ready.
        wait_for_next: bool,
    },
    /// The request needs no more masks.
    Done,
}

/// Mask session of a live request.
pub(super) struct MaskSession {
    request: RequestId,
    inbox: Mutex<MaskCommandInbox>,
    work: Mutex<MaskSessionState>,
    /// Newest mask, with the number of output tokens before the token that it restricts.
    ready: Mutex<Option<(u32, Vec<u32>)>>,
    /// Handle that cancels the work of the thread that runs the session.
    cancellation: Mutex<Option<MaskCancellation>>,
    slow: AtomicBool,
    /// Whether masks of the grammar are slow; shared by all requests of the grammar.
    grammar_is_slow: Arc<atomic::AtomicBool>,
    /// Whether the decoding guide restricts no later token, so that no more masks are needed.
    done: AtomicBool,
}

struct MaskCancellation {
    handle: llguidance::CancellationHandle,
    /// Start time of the mask that is being computed.
    started_at: Option<Instant>,
}

#[derive(Default)]
struct MaskCommandInbox {
    commands: Vec<MaskCommand>,
    /// Whether a worker thread runs the session or the session is in a queue.
    scheduled: bool,
    ended: bool,
}

/// Command for a mask session.
pub(super) enum MaskCommand {
    /// Advances the decoding guide by tokens committed to the output.
    Tokens(TokenVec),
    /// Computes the mask of the next token for a step that samples it: the collector of the step's masks, and
    /// the index of the request's batch row.
    Compute(Arc<StepMaskCollector>, u32),
}

struct MaskSessionState {
    guide: DecodingGuideState,
    /// Number of output tokens before the first one that may be restricted.
    first_masked_token: u32,
    /// Number of output tokens so far.
    output_tokens: u32,
    /// Processor time of all masks of the request.
    spent: Duration,
    pacing: MaskLookahead,
}

/// Decides whether the masks of a request are precomputed, that is, computed before the steps that need them.
struct MaskLookahead {
    precomputes: bool,
    /// Number of consecutive fast masks.
    fast_in_a_row: u32,
    /// Number of consecutive fast masks after which precomputation ends. It doubles each time a step proceeds
    /// without a mask.
    fast_needed: u32,
}

impl MaskSession {
    pub(super) fn new(request: RequestId, guide: DecodingGuide) -> Self {
        let grammar_is_slow = guide.is_slow();
        let is_slow = grammar_is_slow.load(Ordering::Relaxed);
        let work = MaskSessionState {
            first_masked_token: guide.first_masked_token().unwrap_or(u32::MAX),
            guide: DecodingGuideState::new(guide),
            output_tokens: 0,
            spent: Duration::ZERO,
            pacing: MaskLookahead {
                precomputes: is_slow,
                fast_in_a_row: 0,
                fast_needed: FAST_MASKS_TO_RECOVER,
            },
        };
        Self {
            request,
            inbox: Mutex::default(),
            work: Mutex::new(work),
            ready: Mutex::default(),
            cancellation: Mutex::default(),
            slow: AtomicBool::new(is_slow),
            grammar_is_slow,
            done: AtomicBool::new(false),
        }
    }

    /// Returns the mask of the token after `output_tokens` output tokens, if it is ready.
    pub(super) fn ready_mask(&self, output_tokens: u32) -> Option<Vec<u32>> {
        lock(&self.ready)
            .as_ref()
            .filter(|(position, _)| *position == output_tokens)
            .map(|(_, mask)| mask.clone())
    }

    /// Adds a command. Returns whether the session must be queued for a worker thread.
    pub(super) fn enqueue(&self, command: MaskCommand) -> bool {
        let mut inbox = lock(&self.inbox);
        inbox.commands.push(command);
        !std::mem::replace(&mut inbox.scheduled, true)
    }

    /// Ends the session and cancels the mask that is being computed. Returns whether the session must be
    /// queued for a worker thread, which drops the guide, because dropping a large grammar takes long.
    pub(super) fn end(&self) -> bool {
        let mut inbox = lock(&self.inbox);
        inbox.ended = true;
        let idle = !std::mem::replace(&mut inbox.scheduled, true);
        drop(inbox);
        if let Some(cancellation) = &*lock(&self.cancellation) {
            cancellation.handle.cancel();
        }
        idle
    }

    /// Cancels a mask that exceeds `MASK_TIME`.
    pub(super) fn cancel_if_overdue(&self, now: Instant) {
        let cancellation = lock(&self.cancellation);
        let started_at = cancellation.as_ref().and_then(|cancellation| cancellation.started_at);
        if started_at.is_some_and(|start| now.saturating_duration_since(start) > MASK_TIME) {
            tracing::warn!(request = self.request.0, "mask computation timed out");
            cancellation.iter().for_each(|cancellation| cancellation.handle.cancel());
        }
    }

    /// Whether the decoding guide restricts no later token, so that no more masks are needed.
    pub(super) fn is_done(&self) -> bool {
        self.done.load(Ordering::Relaxed)
    }

    /// Whether the masks of the session are slow, so that they would delay other requests.
    pub(super) fn is_slow(&self) -> bool {
        self.slow.load(Ordering::Relaxed)
    }

    /// Runs the commands of the inbox. Returns whether the session must be queued again: its masks became
    /// slow or fast, so it belongs to the other queue now.
    pub(super) fn run_commands(
        &self,
        timings: &GrammarTimings,
        listener: &MaskEventListener,
    ) -> bool {
        let mut work = lock(&self.work);
        loop {
            let commands = {
                let mut inbox = lock(&self.inbox);
                if inbox.ended {
                    work.guide.end();
                    inbox.commands.clear();
                }
                if inbox.commands.is_empty() {
                    inbox.scheduled = false;
                    return false;
                }
                take(&mut inbox.commands)
            };
            let was_slow = self.is_slow();
            self.execute(&mut work, commands, timings, listener);
            if self.is_slow() != was_slow {
                return true;
            }
        }
    }

    fn execute(
        &self,
        work: &mut MaskSessionState,
        commands: Vec<MaskCommand>,
        timings: &GrammarTimings,
        listener: &MaskEventListener,
    ) {
        let mut requested = Vec::new();
        for command in commands {
            match command {
                MaskCommand::Tokens(tokens) => {
                    requested.clear(); // Steps before these tokens have completed.
                    self.advance(work, &tokens);
                }
                MaskCommand::Compute(step, row) => requested.push((step, row)),
            }
        }
        if work.guide.is_done() && !self.done.swap(true, Ordering::Relaxed) {
            listener(self.request, MaskEvent::Done);
        }
        if requested.is_empty() && (self.is_done() || work.output_tokens < work.first_masked_token)
        {
            return;
        }
        let ready = self.ready_mask(work.output_tokens);
        let is_new = ready.is_none();
        let (mask, cpu) = match ready {
            Some(mask) => (mask, Duration::ZERO),
            None => self.compute_mask(work, timings),
        };
        let late_steps =
            requested.into_iter().filter(|(step, row)| !step.put(*row, mask.clone())).count();
        let was_precomputing = work.pacing.precomputes;
        work.pacing.record(late_steps > 0, cpu);
        self.slow.store(work.pacing.precomputes, Ordering::Relaxed);
        if cpu > MASK_SLOW || was_precomputing && !work.pacing.precomputes {
            self.grammar_is_slow.store(cpu > MASK_SLOW, Ordering::Relaxed);
        }
        if late_steps > 0 || is_new && (was_precomputing || work.pacing.precomputes) {
            let (output_tokens, wait_for_next) = (work.output_tokens, work.pacing.precomputes);
            listener(self.request, MaskEvent::Ready { output_tokens, wait_for_next });
        }
    }

    fn advance(&self, work: &mut MaskSessionState, tokens: &[Token]) {
        work.output_tokens += tokens.len() as u32;
        if let Err(error) = work.guide.advance(tokens) {
            tracing::error!(request = self.request.0, %error);
        }
    }

    /// Computes the mask of the next token; empty if the mask failed. Also returns its processor time.
    fn compute_mask(
        &self,
        work: &mut MaskSessionState,
        timings: &GrammarTimings,
    ) -> (Vec<u32>, Duration) {
        if let Some(handle) = work.guide.begin() {
            *lock(&self.cancellation) = Some(MaskCancellation { handle, started_at: None });
        }
        let (start, cpu_before) = (Instant::now(), thread_cpu_time());
        self.set_started_at(Some(start));
        let mask = work.guide.mask().unwrap_or_else(|error| {
            tracing::error!(request = self.request.0, %error);
            None
        });
        self.set_started_at(None);
        let cpu = thread_cpu_time().saturating_sub(cpu_before);
        work.spent += cpu;
        let mask = mask.filter(|_| work.is_within_cpu_budget(self.request));
        timings.masks.record(start.elapsed());
        if mask.is_none() {
            timings.masks_failed.fetch_add(1, Ordering::Relaxed);
        }
        let mask = mask.unwrap_or_default();
        *lock(&self.ready) = Some((work.output_tokens, mask.clone()));
        (mask, cpu)
    }

    fn set_started_at(&self, started_at: Option<Instant>) {
        lock(&self.cancellation).iter_mut().for_each(|current| current.started_at = started_at);
    }
}

impl MaskSessionState {
    /// Whether the request is within its processor-time budget for masks.
    fn is_within_cpu_budget(&self, request: RequestId) -> bool {
        let budget = MASK_BUDGET + MASK_BUDGET_PER_TOKEN * self.output_tokens;
        let is_within_budget = self.spent <= budget;
        if !is_within_budget {
            let (request, spent_ms) = (request.0, self.spent.as_millis() as u64);
            tracing::warn!(request, spent_ms, "processor-time budget for masks exceeded");
        }
        is_within_budget
    }
}

impl MaskLookahead {
    /// Updates the decision after one mask: whether a step proceeded without the mask, and its processor
    /// time.
    fn record(&mut self, proceeded_without: bool, cpu: Duration) {
        if proceeded_without || cpu > MASK_SLOW {
            (self.precomputes, self.fast_in_a_row) = (true, 0);
            if proceeded_without {
                self.fast_needed = self.fast_needed.saturating_mul(2);
            }
        } else if cpu <= MASK_FAST {
            self.fast_in_a_row = self.fast_in_a_row.saturating_add(1);
            self.precomputes &= self.fast_in_a_row < self.fast_needed;
        } else {
            self.fast_in_a_row = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_are_precomputed_until_fast_again() {
        let mut pacing = MaskLookahead { precomputes: false, fast_in_a_row: 0, fast_needed: 2 };
        let fast = Duration::ZERO;
        pacing.record(false, fast);
        assert!(!pacing.precomputes);
        pacing.record(true, fast);
        assert!(pacing.precomputes && pacing.fast_needed == 4);
        for _ in 0..3 {
            pacing.record(false, fast);
            assert!(pacing.precomputes);
        }
        pacing.record(false, fast);
        assert!(!pacing.precomputes);
        pacing.record(false, MASK_SLOW * 2);
        assert!(pacing.precomputes && pacing.fast_needed == 4, "no step missed the mask");
    }
}
