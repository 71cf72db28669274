//! What limits the tokens of one output: a grammar, a budget of reasoning, or both.

use super::session::{GrammarSession, SessionSeed};
use super::thinking_budget::{ThinkingBudget, ThinkingBudgetState};
use llguidance::CancellationHandle;
use protocol::Token;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// What the output of a request follows. Clones serve its choices.
#[derive(Debug, Clone, Default)]
pub struct DecodingGuide {
    /// The language of the output.
    pub grammar: Option<SessionSeed>,
    /// How long it may reason first.
    pub budget: Option<ThinkingBudget>,
}

impl DecodingGuide {
    /// Whether masks of its grammar are known to be slow.
    pub(super) fn is_slow(&self) -> Arc<AtomicBool> {
        self.grammar.as_ref().map(|seed| Arc::clone(seed.is_slow())).unwrap_or_default()
    }

    /// The token of the output, counted from 0, from which on masks may limit it. A budget forces nothing before it
    /// is spent, and no token spends more than one.
    pub fn first_masked_token(&self) -> Option<u32> {
        match (&self.grammar, &self.budget) {
            (Some(_), _) => Some(0),
            (None, budget) => budget.as_ref().map(|budget| budget.tokens),
        }
    }
}

/// One output under its guide.
pub(super) struct DecodingGuideState {
    progress: GrammarProgress,
    budget: Option<ThinkingBudgetState>,
}

/// How the grammar is followed.
enum GrammarProgress {
    /// There is none.
    Unconstrained,
    Pending(SessionSeed),
    Active(Box<GrammarSession>),
    /// It failed, or the output ended.
    Ended,
}

impl DecodingGuideState {
    /// An output before its first token.
    pub(super) fn new(guide: DecodingGuide) -> Self {
        let DecodingGuide { grammar, budget } = guide;
        let meter = budget.map(|budget| ThinkingBudgetState::new(budget, grammar.is_some()));
        Self {
            progress: grammar.map_or(GrammarProgress::Unconstrained, GrammarProgress::Pending),
            budget: meter,
        }
    }

    /// Makes the copy of the grammar that is followed: before its first mask, so before any token. What stops its
    /// work, if it is made now.
    pub(super) fn begin(&mut self) -> Option<CancellationHandle> {
        let GrammarProgress::Pending(seed) = &self.progress else { return None };
        let session = seed.session();
        let handle = session.cancellation_handle();
        self.progress = GrammarProgress::Active(Box::new(session));
        Some(handle)
    }

    /// Follows committed tokens. Errors: the grammar engine panicked.
    pub(super) fn advance(&mut self, tokens: &[Token]) -> Result<(), GrammarPanic> {
        if let Some(meter) = &mut self.budget {
            meter.advance(tokens);
        }
        self.catch_panic(|session| session.advance(tokens)).map(drop)
    }

    /// What may come next, as `GrammarSession::mask` says it. Errors: the grammar engine panicked.
    pub(super) fn mask(&mut self) -> Result<Option<Vec<u32>>, GrammarPanic> {
        let forced = self.budget.as_ref().and_then(ThinkingBudgetState::mask);
        match (&self.progress, forced) {
            (GrammarProgress::Ended, _) => Ok(None),
            (_, Some(mask)) => Ok(Some(mask)),
            (GrammarProgress::Unconstrained, None) => {
                Ok(self.budget.as_ref().map(ThinkingBudgetState::unrestricted_mask))
            }
            _ => Ok(self.catch_panic(GrammarSession::mask)?.flatten()),
        }
    }

    /// Whether nothing limits any further token.
    pub(super) fn is_done(&self) -> bool {
        matches!(self.progress, GrammarProgress::Unconstrained)
            && self.budget.as_ref().is_none_or(ThinkingBudgetState::is_done)
    }

    /// Nobody wants its masks any more.
    pub(super) fn end(&mut self) {
        self.progress = GrammarProgress::Ended;
    }

    /// Works on the session, if there is one; a panic ends it.
    fn catch_panic<T>(
        &mut self,
        f: impl FnOnce(&mut GrammarSession) -> T,
    ) -> Result<Option<T>, GrammarPanic> {
        let GrammarProgress::Active(session) = &mut self.progress else { return Ok(None) };
        let done = catch_unwind(AssertUnwindSafe(|| f(session)));
        done.map(Some).map_err(|_| {
            self.progress = GrammarProgress::Ended;
            GrammarPanic
        })
    }
}

/// The grammar engine panicked.
#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error("the grammar engine panicked")]
pub(super) struct GrammarPanic;
