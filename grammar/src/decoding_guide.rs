//! Decoding guide of one output: a grammar, a thinking budget, or both.

use super::session::{GrammarSession, GrammarSessionFactory, SessionSnapshot};
use super::thinking_budget::{ThinkingBudget, ThinkingBudgetState};
use llguidance::CancellationHandle;
use protocol::{Token, TokenBitmask};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Decoding guide of a request: the grammar and the thinking budget that restrict its output. Each choice of
/// the request uses a clone.
#[derive(Debug, Clone, Default)]
pub struct DecodingGuide {
    /// Factory of the grammar session (parser state) of the output; `None` = no grammar.
    pub grammar: Option<GrammarSessionFactory>,
    /// Limit on the reasoning tokens before the final output.
    pub budget: Option<ThinkingBudget>,
}

impl DecodingGuide {
    /// Returns the flag that is set while the grammar's token bitmasks are slow to compute. All requests
    /// with this grammar share the flag.
    pub(super) fn is_slow(&self) -> Arc<AtomicBool> {
        self.grammar.as_ref().map(|seed| Arc::clone(seed.is_slow())).unwrap_or_default()
    }

    /// Returns the index of the first output token that a mask may restrict; `None` if no token is
    /// restricted. A thinking budget of n tokens cannot restrict a token before index n.
    pub fn first_masked_token(&self) -> Option<u32> {
        match (&self.grammar, &self.budget) {
            (Some(_), _) => Some(0),
            (None, budget) => budget.as_ref().map(|budget| budget.tokens),
        }
    }
}

/// State of one output whose tokens are restricted by a decoding guide (a grammar, a thinking budget, or
/// both).
pub(super) struct DecodingGuideState {
    progress: GrammarSessionState,
    budget: Option<ThinkingBudgetState>,
}

/// Token bitmasks for the positions after the draft tokens of a batch row.
pub(super) struct DraftMasks {
    /// Bitmasks for the positions after draft token 1, 2, …, up to the first draft token that is not
    /// allowed.
    pub(super) bitmasks: Vec<TokenBitmask>,
    /// Handle that cancels the computations of the session's new matcher; `None` if the session's matcher
    /// was not replaced.
    pub(super) cancellation: Option<CancellationHandle>,
}

/// State of the grammar session of an output.
enum GrammarSessionState {
    /// The output has no grammar.
    Unconstrained,
    /// The grammar session has not been created yet. It is created before the first mask is computed.
    Pending(GrammarSessionFactory),
    /// The grammar session has been created.
    Active(Box<GrammarSession>),
    /// The grammar failed, or the output ended.
    Ended,
}

impl DecodingGuideState {
    /// Creates the state of an output before its first token.
    pub(super) fn new(guide: DecodingGuide) -> Self {
        let DecodingGuide { grammar, budget } = guide;
        let budget = budget.map(|budget| ThinkingBudgetState::new(budget, grammar.is_some()));
        Self {
            progress: grammar
                .map_or(GrammarSessionState::Unconstrained, GrammarSessionState::Pending),
            budget,
        }
    }

    /// Creates the grammar session if it does not exist yet. Called before the first mask is computed, and
    /// thus before any token. If this call created the session, returns the handle that cancels the
    /// session's computations.
    pub(super) fn begin(&mut self) -> Option<CancellationHandle> {
        let GrammarSessionState::Pending(seed) = &self.progress else { return None };
        let session = seed.session();
        let handle = session.cancellation_handle();
        self.progress = GrammarSessionState::Active(Box::new(session));
        Some(handle)
    }

    /// Advances the grammar session and the thinking budget by tokens committed to the output.
    ///
    /// Errors: the grammar engine panicked.
    pub(super) fn advance(&mut self, tokens: &[Token]) -> Result<(), GrammarPanic> {
        for (i, &token) in tokens.iter().enumerate() {
            // Like the grammar mask, the tokens forced by the grammar are not computed for a token that the
            // thinking budget forces: see `GrammarSession::advance`.
            if i > 0 && self.budget.as_ref().is_none_or(|budget| budget.forced().is_none()) {
                self.catch_panic(GrammarSession::compute_forced)?;
            }
            if let Some(budget) = &mut self.budget {
                budget.advance(&[token]);
            }
            self.catch_panic(|session| session.advance(&[token]))?;
        }
        Ok(())
    }

    /// Computes the mask of the next token, with the layout of `GrammarSession::mask`; `None` if the output
    /// has ended or no token is allowed.
    ///
    /// Errors: the grammar engine panicked.
    pub(super) fn mask(&mut self) -> Result<Option<Vec<u32>>, GrammarPanic> {
        let forced = self.budget.as_ref().and_then(ThinkingBudgetState::mask);
        match (&self.progress, forced) {
            (GrammarSessionState::Ended, _) => Ok(None),
            (_, Some(mask)) => Ok(Some(mask)),
            (GrammarSessionState::Unconstrained, None) => {
                Ok(self.budget.as_ref().map(ThinkingBudgetState::unrestricted_mask))
            }
            _ => Ok(self.catch_panic(GrammarSession::mask)?.flatten()),
        }
    }

    /// Computes the token bitmask for the position after each draft token, up to the first draft token that
    /// is not allowed. `first` is the bitmask for the position of the first draft token. On return, the
    /// state is the same as before the call.
    ///
    /// Errors: the grammar engine panicked.
    pub(super) fn draft_masks(
        &mut self,
        first: &TokenBitmask,
        drafts: &[Token],
    ) -> Result<DraftMasks, GrammarPanic> {
        let budget = self.budget.clone();
        let mut checkpoint = self.catch_panic(|session| session.checkpoint())?;
        let mut bitmasks: Vec<TokenBitmask> = Vec::new();
        for &draft in drafts {
            let is_allowed = bitmasks.last().unwrap_or(first).allows(draft);
            if !is_allowed || !self.follow_draft(draft, checkpoint.as_mut())? {
                break;
            }
            let Some(mask) = self.mask()? else { break };
            bitmasks.push(mask.into());
        }
        self.budget = budget;
        let restored = checkpoint.map(|checkpoint| self.catch_panic(|s| s.restore(checkpoint)));
        let cancellation = restored.transpose()?.flatten().flatten();
        Ok(DraftMasks { bitmasks, cancellation })
    }

    /// Advances the state by a draft token. Returns whether the mask for the position after this token can
    /// be computed.
    fn follow_draft(
        &mut self,
        draft: Token,
        checkpoint: Option<&mut SessionSnapshot>,
    ) -> Result<bool, GrammarPanic> {
        if let Some(budget) = &mut self.budget {
            budget.advance(&[draft]);
        }
        let Some(checkpoint) = checkpoint else { return Ok(true) };
        let followed = self.catch_panic(|session| session.follow_draft(draft, checkpoint))?;
        Ok(followed.unwrap_or(false))
    }

    /// Whether neither the grammar nor the thinking budget restricts any later token of the output.
    pub(super) fn is_done(&self) -> bool {
        matches!(self.progress, GrammarSessionState::Unconstrained)
            && self.budget.as_ref().is_none_or(ThinkingBudgetState::is_done)
    }

    /// Drops the grammar session, because the output has ended and needs no more masks.
    pub(super) fn end(&mut self) {
        self.progress = GrammarSessionState::Ended;
    }

    /// Runs `f` on the grammar session, if one is active. A panic ends the session.
    fn catch_panic<T>(
        &mut self,
        f: impl FnOnce(&mut GrammarSession) -> T,
    ) -> Result<Option<T>, GrammarPanic> {
        let GrammarSessionState::Active(session) = &mut self.progress else { return Ok(None) };
        let result = catch_unwind(AssertUnwindSafe(|| f(session)));
        result.map(Some).map_err(|_| {
            self.progress = GrammarSessionState::Ended;
            GrammarPanic
        })
    }
}

/// Error: llguidance panicked in a grammar session.
#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error("the grammar engine panicked")]
pub(super) struct GrammarPanic;
