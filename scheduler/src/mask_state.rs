//! Decides whether the next row of a request waits for its grammar bitmask.
//!
//! A grammar bitmask is computed while the step that needs it runs. If the bitmask is overdue
//! (`RowError::MaskOverdue`), it delays that step only briefly: the row samples nothing and is planned again
//! after `SchedulerEvent::MaskReady`. While bitmasks of the request are slow, each later row is planned only
//! after its bitmask is ready.
//!
//! A row with draft tokens needs one more bitmask for each draft token. If these bitmasks are overdue or a
//! draft token is not allowed, the executor rejects the draft tokens without a bitmask, and the row still
//! samples.
//!
//! The constrained part of an output may start after the first token and end before the last token
//! (`SchedulerEvent::MasksDone`). Only rows in this part are masked, that is, sampled under a grammar
//! bitmask. Rows before and after this part are planned without waiting for bitmasks.

/// State of the grammar bitmasks of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GrammarMaskState {
    /// The request is unconstrained.
    Unmasked,
    /// The next token is unconstrained, later tokens may be constrained: `Request::commit` starts masking at
    /// the first constrained position.
    NotStarted,
    /// The next bitmask is computed while its step runs.
    InStep,
    /// The next bitmask is ready (`MaskReady` arrived); each later bitmask is computed while its step runs.
    InStepReady,
    /// The next row is planned only after its bitmask is ready.
    AwaitingMask,
    /// The next bitmask is ready; each later row is planned only after its bitmask is ready.
    AheadReady,
    /// The row in flight may be sampled under a grammar bitmask; later rows are unconstrained.
    LastInFlight,
}

impl GrammarMaskState {
    /// Returns the state of a new request; `from` is the index of its first constrained output token.
    pub(crate) fn new(from: Option<u32>) -> Self {
        match from {
            None => Self::Unmasked,
            Some(0) => Self::InStep,
            Some(_) => Self::NotStarted,
        }
    }

    /// Returns whether the next row may have draft tokens: not after an overdue bitmask, and not while rows
    /// wait for slow bitmasks, because the bitmasks after draft tokens are not computed ahead of the step.
    #[inline]
    pub(crate) fn allows_drafts(self) -> bool {
        matches!(self, Self::Unmasked | Self::NotStarted | Self::InStep)
    }

    /// Returns whether a row that samples after the last committed token is masked, that is, sampled under a
    /// grammar bitmask.
    #[inline]
    pub(crate) fn is_masked(self) -> bool {
        !matches!(self, Self::Unmasked | Self::NotStarted)
    }

    /// Starts masking: the next token is the first one that a bitmask constrains.
    pub(crate) fn begin(&mut self) {
        *self = Self::InStep;
    }

    /// Ends masking (sampling under a grammar bitmask). A row in flight may still be masked; no later row is
    /// planned before the result of that row has arrived.
    pub(crate) fn end(&mut self) {
        *self = if self.is_masked() { Self::LastInFlight } else { Self::Unmasked };
    }

    /// Returns whether rows of the request must wait for a bitmask.
    #[inline]
    pub(crate) fn is_waiting(self) -> bool {
        self == Self::AwaitingMask
    }

    /// Updates the state after the tokens of a row have been committed, so that the next token needs another
    /// bitmask.
    #[inline]
    pub(crate) fn on_row_committed(&mut self) {
        *self = match *self {
            Self::Unmasked | Self::LastInFlight => Self::Unmasked,
            Self::NotStarted => Self::NotStarted,
            // In `AwaitingMask`, a token is committed only after a requeue: recomputation rows do not wait
            // for `MaskReady`, and no `MaskReady` is expected for the next bitmask.
            Self::InStep | Self::InStepReady | Self::AwaitingMask => Self::InStep,
            Self::AheadReady => Self::AwaitingMask,
        };
    }

    /// Updates the state after a row that did not sample because its bitmask was overdue.
    pub(crate) fn on_overdue(&mut self) {
        *self = match *self {
            Self::Unmasked | Self::LastInFlight => Self::Unmasked,
            Self::NotStarted => Self::NotStarted,
            Self::InStep | Self::AwaitingMask => Self::AwaitingMask,
            // The bitmask is ready (`MaskReady` has arrived), so the row is planned again at once. No
            // `MaskReady` is expected for later bitmasks.
            Self::InStepReady => Self::InStepReady,
            Self::AheadReady => Self::AheadReady,
        };
    }

    /// Updates the state after `MaskReady`. If `wait_for_next`, each later row is planned only after its
    /// bitmask is ready.
    pub(crate) fn on_ready(&mut self, wait_for_next: bool) {
        *self = match *self {
            Self::Unmasked | Self::NotStarted | Self::LastInFlight => *self,
            _ if wait_for_next => Self::AheadReady,
            _ => Self::InStepReady,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overdue_mask_is_awaited_in_either_event_order() {
        let mut mask_state = GrammarMaskState::new(Some(0));
        mask_state.on_overdue();
        assert!(mask_state.is_waiting());
        mask_state.on_ready(true);
        assert!(!mask_state.is_waiting());
        mask_state.on_row_committed();
        assert!(mask_state.is_waiting(), "rows wait while bitmasks are slow");
        mask_state.on_ready(false);
        mask_state.on_row_committed();
        assert!(!mask_state.is_waiting(), "rows stop waiting when bitmasks are fast again");

        let mut mask_state = GrammarMaskState::new(Some(0));
        mask_state.on_ready(false);
        mask_state.on_overdue();
        assert!(!mask_state.is_waiting(), "`MaskReady` is not repeated");
        mask_state.on_row_committed();
        assert!(!mask_state.is_waiting(), "no `MaskReady` is expected for the next bitmask");
    }

    #[test]
    fn row_of_several_tokens_awaits_one_mask() {
        let mut mask_state = GrammarMaskState::new(Some(0));
        assert!(mask_state.allows_drafts());
        mask_state.on_ready(true); // A bitmask after a draft token of the row in flight was slow.
        mask_state.on_row_committed();
        assert!(mask_state.is_waiting() && !mask_state.allows_drafts());
        mask_state.on_ready(false);
        assert!(!mask_state.allows_drafts(), "only the first bitmask is ready");
        mask_state.on_row_committed();
        assert!(mask_state.allows_drafts());
    }

    #[test]
    fn unmasked_requests_never_wait() {
        for from in [None, Some(3)] {
            let mut mask_state = GrammarMaskState::new(from);
            mask_state.on_overdue();
            mask_state.on_ready(true);
            mask_state.on_row_committed();
            assert!(!mask_state.is_masked() && !mask_state.is_waiting());
        }
    }

    #[test]
    fn masks_end_after_the_row_in_flight() {
        let mut mask_state = GrammarMaskState::new(Some(0));
        mask_state.on_overdue();
        mask_state.end();
        assert!(
            mask_state.is_masked() && !mask_state.is_waiting(),
            "a row in flight may be masked"
        );
        mask_state.on_ready(true);
        mask_state.on_row_committed();
        assert_eq!(mask_state, GrammarMaskState::Unmasked);
        let mut mask_state = GrammarMaskState::new(Some(0));
        mask_state.end();
        mask_state.on_overdue();
        assert_eq!(
            mask_state,
            GrammarMaskState::Unmasked,
            "the row is planned again without a bitmask"
        );
        let mut mask_state = GrammarMaskState::new(Some(9));
        mask_state.end();
        assert_eq!(mask_state, GrammarMaskState::Unmasked, "masking has not started");
    }
}
