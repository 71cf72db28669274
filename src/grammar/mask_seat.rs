//! One live request that masks limit: what it follows, the orders for it, and how slow its masks are.
//!
//! Orders wait in an inbox until a thread takes the seat; no two threads have it at a time. The mask of the next
//! token is begun as soon as the tokens in front of it are known.

use super::guide::{Guide, Guided};
use super::limits::{
    CALM_MASKS, MASK_BUDGET, MASK_BUDGET_PER_TOKEN, MASK_CALM, MASK_SLOW, MASK_TIME,
};
use super::mask_step::StepMasks;
use super::timings::{GrammarTimings, processor_time};
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Mutex, lock};
use protocol::{RequestId, Token, Tokens};
use std::mem::take;
use std::sync::{Arc, atomic};
use std::time::{Duration, Instant};

/// Hears of masks what those who plan must know.
pub(super) type Announce = Arc<dyn Fn(RequestId, News) + Send + Sync>;

/// What there is to know about the masks of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum News {
    /// One that a step did not wait for, or that is made ahead, is there.
    Made {
        /// Tokens of output in front of the token that it limits.
        outputs: u32,
        /// Whether the next one will be made ahead.
        ahead: bool,
    },
    /// None is needed any more.
    Over,
}

/// A live request.
pub(super) struct Seat {
    request: RequestId,
    inbox: Mutex<Inbox>,
    work: Mutex<Work>,
    /// The newest mask, and the tokens of output in front of it.
    made: Mutex<Option<(u32, Vec<u32>)>>,
    /// What stops the work of a thread that has the seat.
    stop: Mutex<Option<Stop>>,
    slow: AtomicBool,
    /// What is known of its grammar's masks.
    grammar_is_slow: Arc<atomic::AtomicBool>,
    /// Nothing limits its tokens any more.
    over: AtomicBool,
}

struct Stop {
    handle: llguidance::CancellationHandle,
    /// When the mask that is being made was begun.
    since: Option<Instant>,
}

#[derive(Default)]
struct Inbox {
    orders: Vec<Order>,
    /// Whether a thread has the seat, or a lane will give it one.
    taken: bool,
    ended: bool,
}

/// What a seat is to do.
pub(super) enum Order {
    /// These tokens were committed.
    Tokens(Tokens),
    /// A row of a step wants the mask.
    Want(Arc<StepMasks>, u32),
}

struct Work {
    guided: Guided,
    /// Tokens of output in front of the first that may be limited.
    masked_from: u32,
    /// Tokens of output so far.
    outputs: u32,
    /// Processor time of all its masks.
    spent: Duration,
    pace: Pace,
}

/// Whether a request's masks are made ahead of their steps.
struct Pace {
    ahead: bool,
    /// Masks in a row that were quick.
    calm: u32,
    /// As many of them end it; twice as many each time that a step went without a mask.
    enough: u32,
}

impl Seat {
    pub(super) fn new(request: RequestId, guide: Guide) -> Self {
        let grammar_is_slow = guide.is_slow();
        let ahead = grammar_is_slow.load(Ordering::Relaxed);
        let work = Work {
            masked_from: guide.masked_from().unwrap_or(u32::MAX),
            guided: Guided::new(guide),
            outputs: 0,
            spent: Duration::ZERO,
            pace: Pace { ahead, calm: 0, enough: CALM_MASKS },
        };
        Self {
            request,
            inbox: Mutex::default(),
            work: Mutex::new(work),
            made: Mutex::default(),
            stop: Mutex::default(),
            slow: AtomicBool::new(ahead),
            grammar_is_slow,
            over: AtomicBool::new(false),
        }
    }

    /// The mask behind so many tokens of output, if it is there.
    pub(super) fn made(&self, outputs: u32) -> Option<Vec<u32>> {
        lock(&self.made).as_ref().filter(|(at, _)| *at == outputs).map(|(_, mask)| mask.clone())
    }

    /// Adds an order; whether a thread must be found for it.
    pub(super) fn order(&self, order: Order) -> bool {
        let mut inbox = lock(&self.inbox);
        inbox.orders.push(order);
        !std::mem::replace(&mut inbox.taken, true)
    }

    /// Nobody wants its masks any more, the one being made included; whether a thread must be found that drops what it
    /// followed, which takes long for a large grammar.
    pub(super) fn end(&self) -> bool {
        let mut inbox = lock(&self.inbox);
        inbox.ended = true;
        let idle = !std::mem::replace(&mut inbox.taken, true);
        drop(inbox);
        if let Some(stop) = &*lock(&self.stop) {
            stop.handle.cancel();
        }
        idle
    }

    /// Gives up a mask that takes too long.
    pub(super) fn check_time(&self, now: Instant) {
        let stop = lock(&self.stop);
        let since = stop.as_ref().and_then(|stop| stop.since);
        if since.is_some_and(|since| now.saturating_duration_since(since) > MASK_TIME) {
            tracing::warn!(request = self.request.0, "a mask takes too long");
            stop.iter().for_each(|stop| stop.handle.cancel());
        }
    }

    /// Whether nothing limits its tokens any more.
    pub(super) fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    /// Whether its masks hold up others.
    pub(super) fn is_slow(&self) -> bool {
        self.slow.load(Ordering::Relaxed)
    }

    /// Carries out what is in the inbox; whether there is more, for a thread of the lane that it belongs to now.
    pub(super) fn serve(&self, timings: &GrammarTimings, announce: &Announce) -> bool {
        let mut work = lock(&self.work);
        loop {
            let orders = {
                let mut inbox = lock(&self.inbox);
                if inbox.ended {
                    work.guided.end();
                    inbox.orders.clear();
                }
                if inbox.orders.is_empty() {
                    inbox.taken = false;
                    return false;
                }
                take(&mut inbox.orders)
            };
            let was_slow = self.is_slow();
            self.carry_out(&mut work, orders, timings, announce);
            if self.is_slow() != was_slow {
                return true;
            }
        }
    }

    fn carry_out(
        &self,
        work: &mut Work,
        orders: Vec<Order>,
        timings: &GrammarTimings,
        announce: &Announce,
    ) {
        let mut wants = Vec::new();
        for order in orders {
            match order {
                Order::Tokens(tokens) => {
                    wants.clear(); // Steps before these tokens are over.
                    self.advance(work, &tokens);
                }
                Order::Want(step, row) => wants.push((step, row)),
            }
        }
        if work.guided.is_over() && !self.over.swap(true, Ordering::Relaxed) {
            announce(self.request, News::Over);
        }
        if wants.is_empty() && (self.is_over() || work.outputs < work.masked_from) {
            return;
        }
        let made = self.made(work.outputs);
        let is_new = made.is_none();
        let (mask, cpu) = match made {
            Some(mask) => (mask, Duration::ZERO),
            None => self.make(work, timings),
        };
        let missed = wants.into_iter().filter(|(step, row)| !step.put(*row, mask.clone())).count();
        let was_ahead = work.pace.ahead;
        work.pace.note(missed > 0, cpu);
        self.slow.store(work.pace.ahead, Ordering::Relaxed);
        if cpu > MASK_SLOW || was_ahead && !work.pace.ahead {
            self.grammar_is_slow.store(cpu > MASK_SLOW, Ordering::Relaxed);
        }
        if missed > 0 || is_new && (was_ahead || work.pace.ahead) {
            let (outputs, ahead) = (work.outputs, work.pace.ahead);
            announce(self.request, News::Made { outputs, ahead });
        }
    }

    fn advance(&self, work: &mut Work, tokens: &[Token]) {
        work.outputs += tokens.len() as u32;
        if let Err(error) = work.guided.advance(tokens) {
            tracing::error!(request = self.request.0, %error);
        }
    }

    /// Makes the mask of the next token, empty if there is none; how long a processor was busy with it.
    fn make(&self, work: &mut Work, timings: &GrammarTimings) -> (Vec<u32>, Duration) {
        if let Some(handle) = work.guided.begin() {
            *lock(&self.stop) = Some(Stop { handle, since: None });
        }
        let (since, cpu_before) = (Instant::now(), processor_time());
        self.set_since(Some(since));
        let mask = work.guided.mask().unwrap_or_else(|error| {
            tracing::error!(request = self.request.0, %error);
            None
        });
        self.set_since(None);
        let cpu = processor_time().saturating_sub(cpu_before);
        work.spent += cpu;
        let mask = mask.filter(|_| work.affords(self.request));
        timings.masks.note(since.elapsed());
        if mask.is_none() {
            timings.masks_failed.fetch_add(1, Ordering::Relaxed);
        }
        let mask = mask.unwrap_or_default();
        *lock(&self.made) = Some((work.outputs, mask.clone()));
        (mask, cpu)
    }

    fn set_since(&self, since: Option<Instant>) {
        lock(&self.stop).iter_mut().for_each(|stop| stop.since = since);
    }
}

impl Work {
    /// Whether its masks are within what a request may spend on them.
    fn affords(&self, request: RequestId) -> bool {
        let budget = MASK_BUDGET + MASK_BUDGET_PER_TOKEN * self.outputs;
        let affords = self.spent <= budget;
        if !affords {
            tracing::warn!(request = request.0, spent = ?self.spent, "masks cost too much");
        }
        affords
    }
}

impl Pace {
    /// Another mask: whether a step went without it, and what it cost.
    fn note(&mut self, missed: bool, cpu: Duration) {
        if missed || cpu > MASK_SLOW {
            (self.ahead, self.calm) = (true, 0);
            if missed {
                self.enough = self.enough.saturating_mul(2);
            }
        } else if cpu <= MASK_CALM {
            self.calm = self.calm.saturating_add(1);
            self.ahead &= self.calm < self.enough;
        } else {
            self.calm = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_are_made_ahead_until_they_are_quick_again() {
        let mut pace = Pace { ahead: false, calm: 0, enough: 2 };
        let quick = Duration::ZERO;
        pace.note(false, quick);
        assert!(!pace.ahead);
        pace.note(true, quick);
        assert!(pace.ahead && pace.enough == 4);
        for _ in 0..3 {
            pace.note(false, quick);
            assert!(pace.ahead);
        }
        pace.note(false, quick);
        assert!(!pace.ahead);
        pace.note(false, MASK_SLOW * 2);
        assert!(pace.ahead && pace.enough == 4, "nobody missed it");
    }
}
