//! Whether the next row of a request waits for its mask.
//!
//! A mask is made while the step that needs it computes. One that was late there (`RowError::MaskLate`) cost that
//! step a moment, and must not cost the next one too: its row is planned again once `Event::MaskMade` says that it
//! is there, and so are the rows behind it for as long as the masks of this request are slow.

/// How the masks of a request come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Masking {
    /// It needs none.
    Free,
    /// The next one is made while its step computes.
    InStep,
    /// The same, and it is there already: the news came before that of its lateness.
    InStepMade,
    /// The next one must be there first.
    Awaited,
    /// The same, and it is there.
    AheadMade,
}

impl Masking {
    /// The masks of a new request.
    pub(crate) fn new(constrained: bool) -> Self {
        if constrained { Self::InStep } else { Self::Free }
    }

    /// Whether its rows that sample are masked.
    #[inline]
    pub(crate) fn is_on(self) -> bool {
        self != Self::Free
    }

    /// Whether no row may sample yet.
    #[inline]
    pub(crate) fn waits(self) -> bool {
        self == Self::Awaited
    }

    /// A token was committed: another mask is needed.
    #[inline]
    pub(crate) fn advance(&mut self) {
        *self = match *self {
            Self::Free => Self::Free,
            // A token that came although its mask was awaited was restarted with it: nobody promised the next one.
            Self::InStep | Self::InStepMade | Self::Awaited => Self::InStep,
            Self::AheadMade => Self::Awaited,
        };
    }

    /// A step did not wait for the mask any longer.
    pub(crate) fn late(&mut self) {
        *self = match *self {
            Self::Free => Self::Free,
            Self::InStep | Self::Awaited => Self::Awaited,
            Self::InStepMade | Self::AheadMade => Self::AheadMade,
        };
    }

    /// The mask is there; `ahead`: the next ones are to be waited for as well.
    pub(crate) fn made(&mut self, ahead: bool) {
        *self = match *self {
            Self::Free => Self::Free,
            _ if ahead => Self::AheadMade,
            _ => Self::InStepMade,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_mask_is_waited_for_whichever_news_comes_first() {
        let mut masking = Masking::new(true);
        masking.late();
        assert!(masking.waits());
        masking.made(true);
        assert!(!masking.waits());
        masking.advance();
        assert!(masking.waits(), "slow ones are made ahead");
        masking.made(false);
        masking.advance();
        assert!(!masking.waits(), "and no longer than they are slow");

        let mut masking = Masking::new(true);
        masking.made(false);
        masking.late();
        assert!(!masking.waits(), "nobody would say again that it is there");
    }

    #[test]
    fn without_masks_nothing_is_waited_for() {
        let mut masking = Masking::new(false);
        masking.late();
        masking.made(true);
        masking.advance();
        assert!(!masking.is_on() && !masking.waits());
    }
}
