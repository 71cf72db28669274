//! Whether the next row of a request waits for its mask.
//!
//! A mask is made while the step that needs it computes. One that was late there (`RowError::MaskOverdue`) cost that
//! step a moment, and must not cost the next one too: its row is planned again once `SchedulerEvent::MaskReady` says that it
//! is there, and so are the rows behind it for as long as the masks of this request are slow.
//!
//! Masks may begin in the middle of an output, and end there (`SchedulerEvent::MasksDone`). Rows in front of the first masked
//! one and behind the last are planned ahead like any other.

/// How the masks of a request come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MaskState {
    /// It needs none.
    Unmasked,
    /// None yet: `Request::commit` says when.
    NotStarted,
    /// The next one is made while its step computes.
    InStep,
    /// The same, and it is there already: the news came before that of its lateness.
    InStepReady,
    /// The next one must be there first.
    AwaitingMask,
    /// The same, and it is there.
    AheadReady,
    /// The row under way may be masked, no row behind it is.
    LastInFlight,
}

impl MaskState {
    /// The masks of a new request, from its output's token `from` on.
    pub(crate) fn new(from: Option<u32>) -> Self {
        match from {
            None => Self::Unmasked,
            Some(0) => Self::InStep,
            Some(_) => Self::NotStarted,
        }
    }

    /// Whether a row that samples behind the last committed token is masked.
    #[inline]
    pub(crate) fn is_masked(self) -> bool {
        !matches!(self, Self::Unmasked | Self::NotStarted)
    }

    /// The next token is the first masked one.
    pub(crate) fn begin(&mut self) {
        *self = Self::InStep;
    }

    /// No further token is limited. A row in flight may still be masked: none is planned behind it before it is
    /// answered.
    pub(crate) fn end(&mut self) {
        *self = if self.is_masked() { Self::LastInFlight } else { Self::Unmasked };
    }

    /// Whether no row may sample yet.
    #[inline]
    pub(crate) fn is_waiting(self) -> bool {
        self == Self::AwaitingMask
    }

    /// A token was committed: another mask is needed.
    #[inline]
    pub(crate) fn on_token_committed(&mut self) {
        *self = match *self {
            Self::Unmasked | Self::LastInFlight => Self::Unmasked,
            Self::NotStarted => Self::NotStarted,
            // A token that came although its mask was awaited was restarted with it: nobody promised the next one.
            Self::InStep | Self::InStepReady | Self::AwaitingMask => Self::InStep,
            Self::AheadReady => Self::AwaitingMask,
        };
    }

    /// A step did not wait for the mask any longer.
    pub(crate) fn on_overdue(&mut self) {
        *self = match *self {
            Self::Unmasked | Self::LastInFlight => Self::Unmasked,
            Self::NotStarted => Self::NotStarted,
            Self::InStep | Self::AwaitingMask => Self::AwaitingMask,
            // Those behind it are not waited for: nobody has promised to tell of them.
            Self::InStepReady => Self::InStepReady,
            Self::AheadReady => Self::AheadReady,
        };
    }

    /// The mask is there; `ahead`: the next ones are to be waited for as well.
    pub(crate) fn on_ready(&mut self, ahead: bool) {
        *self = match *self {
            Self::Unmasked | Self::NotStarted | Self::LastInFlight => *self,
            _ if ahead => Self::AheadReady,
            _ => Self::InStepReady,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overdue_mask_is_awaited_in_either_event_order() {
        let mut masking = MaskState::new(Some(0));
        masking.on_overdue();
        assert!(masking.is_waiting());
        masking.on_ready(true);
        assert!(!masking.is_waiting());
        masking.on_token_committed();
        assert!(masking.is_waiting(), "slow ones are made ahead");
        masking.on_ready(false);
        masking.on_token_committed();
        assert!(!masking.is_waiting(), "and no longer than they are slow");

        let mut masking = MaskState::new(Some(0));
        masking.on_ready(false);
        masking.on_overdue();
        assert!(!masking.is_waiting(), "nobody would say again that it is there");
        masking.on_token_committed();
        assert!(!masking.is_waiting(), "nor of the next one");
    }

    #[test]
    fn unmasked_requests_never_wait() {
        for from in [None, Some(3)] {
            let mut masking = MaskState::new(from);
            masking.on_overdue();
            masking.on_ready(true);
            masking.on_token_committed();
            assert!(!masking.is_masked() && !masking.is_waiting());
        }
    }

    #[test]
    fn masks_end_after_the_row_in_flight() {
        let mut masking = MaskState::new(Some(0));
        masking.on_overdue();
        masking.end();
        assert!(masking.is_masked() && !masking.is_waiting(), "a row in flight may be masked");
        masking.on_ready(true);
        masking.on_token_committed();
        assert_eq!(masking, MaskState::Unmasked);
        let mut masking = MaskState::new(Some(0));
        masking.end();
        masking.on_overdue();
        assert_eq!(masking, MaskState::Unmasked, "the row is planned again without one");
        let mut masking = MaskState::new(Some(9));
        masking.end();
        assert_eq!(masking, MaskState::Unmasked, "they never began");
    }
}
