//! One live request that masks limit: what it follows, the orders for it, and how slow its masks are.
//!
//! Orders wait in an inbox until a thread takes the seat; no two threads have it at a time. The mask of the next
//! token is begun as soon as the tokens in front of it are known.

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

/// Hears of masks what those who plan must know.
pub(super) type MaskEventListener = Arc<dyn Fn(RequestId, MaskEvent) + Send + Sync>;

/// What there is to know about the masks of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MaskEvent {
    /// One that a step did not wait for, or that is made ahead, is there.
    Ready {
        /// Tokens of output in front of the token that it limits.
        outputs: u32,
        /// Whether the next one will be made ahead.
        ahead: bool,
    },
    /// None is needed any more.
    Done,
}

/// A live request.
pub(super) struct MaskSession {
    request: RequestId,
    inbox: Mutex<MaskCommandInbox>,
    work: Mutex<MaskSessionWork>,
    /// The newest mask, and the tokens of output in front of it.
    ready: Mutex<Option<(u32, Vec<u32>)>>,
    /// What stops the work of a thread that has the seat.
    cancellation: Mutex<Option<MaskCancellation>>,
    slow: AtomicBool,
    /// What is known of its grammar's masks.
    grammar_is_slow: Arc<atomic::AtomicBool>,
    /// Nothing limits its tokens any more.
    done: AtomicBool,
}

struct MaskCancellation {
    handle: llguidance::CancellationHandle,
    /// When the mask that is being made was begun.
    started_at: Option<Instant>,
}

#[derive(Default)]
struct MaskCommandInbox {
    commands: Vec<MaskCommand>,
    /// Whether a thread has the seat, or a lane will give it one.
    scheduled: bool,
    ended: bool,
}

/// What a seat is to do.
pub(super) enum MaskCommand {
    /// These tokens were committed.
    Tokens(TokenVec),
    /// A row of a step wants the mask.
    Compute(Arc<StepMaskCollector>, u32),
}

struct MaskSessionWork {
    guide: DecodingGuideState,
    /// Tokens of output in front of the first that may be limited.
    first_masked_token: u32,
    /// Tokens of output so far.
    outputs: u32,
    /// Processor time of all its masks.
    spent: Duration,
    pacing: MaskPacing,
}

/// Whether a request's masks are made ahead of their steps.
struct MaskPacing {
    precomputes: bool,
    /// Masks in a row that were quick.
    fast_in_a_row: u32,
    /// As many of them end it; twice as many each time that a step went without a mask.
    fast_needed: u32,
}

impl MaskSession {
    pub(super) fn new(request: RequestId, guide: DecodingGuide) -> Self {
        let grammar_is_slow = guide.is_slow();
        let ahead = grammar_is_slow.load(Ordering::Relaxed);
        let work = MaskSessionWork {
            first_masked_token: guide.first_masked_token().unwrap_or(u32::MAX),
            guide: DecodingGuideState::new(guide),
            outputs: 0,
            spent: Duration::ZERO,
            pacing: MaskPacing {
                precomputes: ahead,
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
            slow: AtomicBool::new(ahead),
            grammar_is_slow,
            done: AtomicBool::new(false),
        }
    }

    /// The mask behind so many tokens of output, if it is there.
    pub(super) fn ready_mask(&self, outputs: u32) -> Option<Vec<u32>> {
        lock(&self.ready).as_ref().filter(|(at, _)| *at == outputs).map(|(_, mask)| mask.clone())
    }

    /// Adds an order; whether a thread must be found for it.
    pub(super) fn enqueue(&self, order: MaskCommand) -> bool {
        let mut inbox = lock(&self.inbox);
        inbox.commands.push(order);
        !std::mem::replace(&mut inbox.scheduled, true)
    }

    /// Nobody wants its masks any more, the one being made included; whether a thread must be found that drops what it
    /// followed, which takes long for a large grammar.
    pub(super) fn end(&self) -> bool {
        let mut inbox = lock(&self.inbox);
        inbox.ended = true;
        let idle = !std::mem::replace(&mut inbox.scheduled, true);
        drop(inbox);
        if let Some(stop) = &*lock(&self.cancellation) {
            stop.handle.cancel();
        }
        idle
    }

    /// Gives up a mask that takes too long.
    pub(super) fn cancel_if_overdue(&self, now: Instant) {
        let stop = lock(&self.cancellation);
        let since = stop.as_ref().and_then(|stop| stop.started_at);
        if since.is_some_and(|since| now.saturating_duration_since(since) > MASK_TIME) {
            tracing::warn!(request = self.request.0, "a mask takes too long");
            stop.iter().for_each(|stop| stop.handle.cancel());
        }
    }

    /// Whether nothing limits its tokens any more.
    pub(super) fn is_done(&self) -> bool {
        self.done.load(Ordering::Relaxed)
    }

    /// Whether its masks hold up others.
    pub(super) fn is_slow(&self) -> bool {
        self.slow.load(Ordering::Relaxed)
    }

    /// Carries out what is in the inbox; whether there is more, for a thread of the lane that it belongs to now.
    pub(super) fn run_commands(
        &self,
        timings: &GrammarTimings,
        announce: &MaskEventListener,
    ) -> bool {
        let mut work = lock(&self.work);
        loop {
            let orders = {
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
            self.execute(&mut work, orders, timings, announce);
            if self.is_slow() != was_slow {
                return true;
            }
        }
    }

    fn execute(
        &self,
        work: &mut MaskSessionWork,
        orders: Vec<MaskCommand>,
        timings: &GrammarTimings,
        announce: &MaskEventListener,
    ) {
        let mut wants = Vec::new();
        for order in orders {
            match order {
                MaskCommand::Tokens(tokens) => {
                    wants.clear(); // Steps before these tokens are over.
                    self.advance(work, &tokens);
                }
                MaskCommand::Compute(step, row) => wants.push((step, row)),
            }
        }
        if work.guide.is_done() && !self.done.swap(true, Ordering::Relaxed) {
            announce(self.request, MaskEvent::Done);
        }
        if wants.is_empty() && (self.is_done() || work.outputs < work.first_masked_token) {
            return;
        }
        let made = self.ready_mask(work.outputs);
        let is_new = made.is_none();
        let (mask, cpu) = match made {
            Some(mask) => (mask, Duration::ZERO),
            None => self.compute_mask(work, timings),
        };
        let missed = wants.into_iter().filter(|(step, row)| !step.put(*row, mask.clone())).count();
        let was_ahead = work.pacing.precomputes;
        work.pacing.record(missed > 0, cpu);
        self.slow.store(work.pacing.precomputes, Ordering::Relaxed);
        if cpu > MASK_SLOW || was_ahead && !work.pacing.precomputes {
            self.grammar_is_slow.store(cpu > MASK_SLOW, Ordering::Relaxed);
        }
        if missed > 0 || is_new && (was_ahead || work.pacing.precomputes) {
            let (outputs, ahead) = (work.outputs, work.pacing.precomputes);
            announce(self.request, MaskEvent::Ready { outputs, ahead });
        }
    }

    fn advance(&self, work: &mut MaskSessionWork, tokens: &[Token]) {
        work.outputs += tokens.len() as u32;
        if let Err(error) = work.guide.advance(tokens) {
            tracing::error!(request = self.request.0, %error);
        }
    }

    /// Makes the mask of the next token, empty if there is none; how long a processor was busy with it.
    fn compute_mask(
        &self,
        work: &mut MaskSessionWork,
        timings: &GrammarTimings,
    ) -> (Vec<u32>, Duration) {
        if let Some(handle) = work.guide.begin() {
            *lock(&self.cancellation) = Some(MaskCancellation { handle, started_at: None });
        }
        let (since, cpu_before) = (Instant::now(), thread_cpu_time());
        self.set_started_at(Some(since));
        let mask = work.guide.mask().unwrap_or_else(|error| {
            tracing::error!(request = self.request.0, %error);
            None
        });
        self.set_started_at(None);
        let cpu = thread_cpu_time().saturating_sub(cpu_before);
        work.spent += cpu;
        let mask = mask.filter(|_| work.is_within_cpu_budget(self.request));
        timings.masks.record(since.elapsed());
        if mask.is_none() {
            timings.masks_failed.fetch_add(1, Ordering::Relaxed);
        }
        let mask = mask.unwrap_or_default();
        *lock(&self.ready) = Some((work.outputs, mask.clone()));
        (mask, cpu)
    }

    fn set_started_at(&self, since: Option<Instant>) {
        lock(&self.cancellation).iter_mut().for_each(|stop| stop.started_at = since);
    }
}

impl MaskSessionWork {
    /// Whether its masks are within what a request may spend on them.
    fn is_within_cpu_budget(&self, request: RequestId) -> bool {
        let budget = MASK_BUDGET + MASK_BUDGET_PER_TOKEN * self.outputs;
        let affords = self.spent <= budget;
        if !affords {
            tracing::warn!(request = request.0, spent = ?self.spent, "masks cost too much");
        }
        affords
    }
}

impl MaskPacing {
    /// Another mask: whether a step went without it, and what it cost.
    fn record(&mut self, missed: bool, cpu: Duration) {
        if missed || cpu > MASK_SLOW {
            (self.precomputes, self.fast_in_a_row) = (true, 0);
            if missed {
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
        let mut pace = MaskPacing { precomputes: false, fast_in_a_row: 0, fast_needed: 2 };
        let quick = Duration::ZERO;
        pace.record(false, quick);
        assert!(!pace.precomputes);
        pace.record(true, quick);
        assert!(pace.precomputes && pace.fast_needed == 4);
        for _ in 0..3 {
            pace.record(false, quick);
            assert!(pace.precomputes);
        }
        pace.record(false, quick);
        assert!(!pace.precomputes);
        pace.record(false, MASK_SLOW * 2);
        assert!(pace.precomputes && pace.fast_needed == 4, "nobody missed it");
    }
}
