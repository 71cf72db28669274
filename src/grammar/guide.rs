//! What limits the tokens of one output: a grammar, a budget of reasoning, or both.

use super::budget::{Budget, Meter};
use super::session::{Seed, Session};
use llguidance::CancellationHandle;
use protocol::Token;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// What the output of a request follows. Clones serve its choices.
#[derive(Debug, Clone, Default)]
pub struct Guide {
    /// The language of the output.
    pub grammar: Option<Seed>,
    /// How long it may reason first.
    pub budget: Option<Budget>,
}

impl Guide {
    /// Whether masks of its grammar are known to be slow.
    pub(super) fn is_slow(&self) -> Arc<AtomicBool> {
        self.grammar.as_ref().map(|seed| Arc::clone(seed.is_slow())).unwrap_or_default()
    }

    /// The token of the output, counted from 0, from which on masks may limit it. A budget forces nothing before it
    /// is spent, and no token spends more than one.
    pub fn masked_from(&self) -> Option<u32> {
        match (&self.grammar, &self.budget) {
            (Some(_), _) => Some(0),
            (None, budget) => budget.as_ref().map(|budget| budget.tokens),
        }
    }
}

/// One output under its guide.
pub(super) struct Guided {
    following: Following,
    meter: Option<Meter>,
}

/// How the grammar is followed.
enum Following {
    /// There is none.
    Free,
    Seed(Seed),
    Session(Box<Session>),
    /// It failed, or the output ended.
    Nothing,
}

impl Guided {
    /// An output before its first token.
    pub(super) fn new(guide: Guide) -> Self {
        let Guide { grammar, budget } = guide;
        let meter = budget.map(|budget| Meter::new(budget, grammar.is_some()));
        Self { following: grammar.map_or(Following::Free, Following::Seed), meter }
    }

    /// Makes the copy of the grammar that is followed: before its first mask, so before any token. What stops its
    /// work, if it is made now.
    pub(super) fn begin(&mut self) -> Option<CancellationHandle> {
        let Following::Seed(seed) = &self.following else { return None };
        let session = seed.session();
        let handle = session.cancellation();
        self.following = Following::Session(Box::new(session));
        Some(handle)
    }

    /// Follows committed tokens. Errors: the grammar engine panicked.
    pub(super) fn advance(&mut self, tokens: &[Token]) -> Result<(), Panicked> {
        if let Some(meter) = &mut self.meter {
            meter.advance(tokens);
        }
        self.guarded(|session| session.advance(tokens)).map(drop)
    }

    /// What may come next, as `Session::mask` says it. Errors: the grammar engine panicked.
    pub(super) fn mask(&mut self) -> Result<Option<Vec<u32>>, Panicked> {
        let forced = self.meter.as_ref().and_then(Meter::mask);
        match (&self.following, forced) {
            (Following::Nothing, _) => Ok(None),
            (_, Some(mask)) => Ok(Some(mask)),
            (Following::Free, None) => Ok(self.meter.as_ref().map(Meter::open_mask)),
            _ => Ok(self.guarded(Session::mask)?.flatten()),
        }
    }

    /// Whether nothing limits any further token.
    pub(super) fn is_over(&self) -> bool {
        matches!(self.following, Following::Free) && self.meter.as_ref().is_none_or(Meter::is_over)
    }

    /// Nobody wants its masks any more.
    pub(super) fn end(&mut self) {
        self.following = Following::Nothing;
    }

    /// Works on the session, if there is one; a panic ends it.
    fn guarded<T>(&mut self, f: impl FnOnce(&mut Session) -> T) -> Result<Option<T>, Panicked> {
        let Following::Session(session) = &mut self.following else { return Ok(None) };
        let done = catch_unwind(AssertUnwindSafe(|| f(session)));
        done.map(Some).map_err(|_| {
            self.following = Following::Nothing;
            Panicked
        })
    }
}

/// The grammar engine panicked.
#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error("the grammar engine panicked")]
pub(super) struct Panicked;
