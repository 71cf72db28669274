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
    /// Grammar of the output.
    pub grammar: Option<GrammarSessionFactory>,
    /// Limit on the reasoning tokens before the final output.
    pub budget: Option<ThinkingBudget>,
}

impl DecodingGuide {
    /// Returns the flag that the grammar's masks are slow; it is shared by all requests with this grammar.
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

/// State of one output that is restricted by a decoding guide.
pub(super) struct DecodingGuideState {
    progress: GrammarSessionState,
    budget: Option<ThinkingBudgetState>,
}

/// Masks of the positions after each draft token.
pub(super) struct DraftMasks {
    /// One mask per leading draft token that is allowed: the mask of the position after it.
    pub(super) bitmasks: Vec<TokenBitmask>,
    /// Handle that cancels the session's work, if a new matcher replaced the session's matcher.
    pub(super) cancellation: Option<CancellationHandle>,
}

/// State of the grammar session of an output.
enum GrammarSessionState {
    /// The output has no grammar.
    Unconstrained,
    /// The session has not been created. It is created before the first mask is computed.
    Pending(GrammarSessionFactory),
    /// The session has started.
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

    /// Creates the grammar session if it is pending; this happens before the first mask and thus before any
    /// token. Returns the handle that cancels the session's work if the session was created by this call.
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
            // There is no grammar mask for tokens forced by the budget: see `GrammarSession::advance`.
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

    /// Computes the masks after each draft token, up to the first draft token that is not allowed. `first` is
    /// the mask of the first draft token. Afterwards, the guide is back in the state before the draft tokens.
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

    /// Advances by a draft token. Returns whether the mask after this token can be computed.
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

    /// Whether no later token is restricted.
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
