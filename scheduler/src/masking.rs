//! Whether the next row of a request waits for its mask.
//!
//! A mask is made while the step that needs it computes. One that was late there (`RowError::MaskLate`) cost that
//! step a moment, and must not cost the next one too: its row is planned again once `Event::MaskMade` says that it
//! is there, and so are the rows behind it for as long as the masks of this request are slow.
//!
//! Masks may begin in the middle of an output, and end there (`Event::MasksOver`). Rows in front of the first masked
//! one and behind the last are planned ahead like any other.

/// How the masks of a request come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Masking {
    /// It needs none.
    Free,
    /// None yet: `Request::commit` says when.
    Later,
    /// The next one is made while its step computes.
    InStep,
    /// The same, and it is there already: the news came before that of its lateness.
    InStepMade,
    /// The next one must be there first.
    Awaited,
    /// The same, and it is there.
    AheadMade,
    /// The row under way may be masked, no row behind it is.
    Last,
}

impl Masking {
    /// The masks of a new request, from its output's token `from` on.
    pub(crate) fn new(from: Option<u32>) -> Self {
        match from {
            None => Self::Free,
            Some(0) => Self::InStep,
            Some(_) => Self::Later,
        }
    }

    /// Whether a row that samples behind the last committed token is masked.
    #[inline]
    pub(crate) fn is_on(self) -> bool {
        !matches!(self, Self::Free | Self::Later)
    }

    /// The next token is the first masked one.
    pub(crate) fn begin(&mut self) {
        *self = Self::InStep;
    }

    /// No further token is limited. A row in flight may still be masked: none is planned behind it before it is
    /// answered.
    pub(crate) fn end(&mut self) {
        *self = if self.is_on() { Self::Last } else { Self::Free };
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
            Self::Free | Self::Last => Self::Free,
            Self::Later => Self::Later,
            // A token that came although its mask was awaited was restarted with it: nobody promised the next one.
            Self::InStep | Self::InStepMade | Self::Awaited => Self::InStep,
            Self::AheadMade => Self::Awaited,
        };
    }

    /// A step did not wait for the mask any longer.
    pub(crate) fn late(&mut self) {
        *self = match *self {
            Self::Free | Self::Last => Self::Free,
            Self::Later => Self::Later,
            Self::InStep | Self::Awaited => Self::Awaited,
            // Those behind it are not waited for: nobody has promised to tell of them.
            Self::InStepMade => Self::InStepMade,
            Self::AheadMade => Self::AheadMade,
        };
    }

    /// The mask is there; `ahead`: the next ones are to be waited for as well.
    pub(crate) fn made(&mut self, ahead: bool) {
        *self = match *self {
            Self::Free | Self::Later | Self::Last => *self,
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
        let mut masking = Masking::new(Some(0));
        masking.late();
        assert!(masking.waits());
        masking.made(true);
        assert!(!masking.waits());
        masking.advance();
        assert!(masking.waits(), "slow ones are made ahead");
        masking.made(false);
        masking.advance();
        assert!(!masking.waits(), "and no longer than they are slow");

        let mut masking = Masking::new(Some(0));
        masking.made(false);
        masking.late();
        assert!(!masking.waits(), "nobody would say again that it is there");
        masking.advance();
        assert!(!masking.waits(), "nor of the next one");
    }

    #[test]
    fn without_masks_nothing_is_waited_for() {
        for from in [None, Some(3)] {
            let mut masking = Masking::new(from);
            masking.late();
            masking.made(true);
            masking.advance();
            assert!(!masking.is_on() && !masking.waits());
        }
    }

    #[test]
    fn masks_end_behind_the_row_under_way() {
        let mut masking = Masking::new(Some(0));
        masking.late();
        masking.end();
        assert!(masking.is_on() && !masking.waits(), "a row in flight may be masked");
        masking.made(true);
        masking.advance();
        assert_eq!(masking, Masking::Free);
        let mut masking = Masking::new(Some(0));
        masking.end();
        masking.late();
        assert_eq!(masking, Masking::Free, "the row is planned again without one");
        let mut masking = Masking::new(Some(9));
        masking.end();
        assert_eq!(masking, Masking::Free, "they never began");
    }
}
