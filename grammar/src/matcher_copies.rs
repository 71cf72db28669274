//! Memory accounting for copies of llguidance matchers: each running request has its own copy as long as
//! all copies fit in `MATCHER_COPIES_BYTES`.

use super::limits::MATCHER_COPIES_BYTES;
use llguidance::Matcher;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Counts the total size in bytes of the deep copies of llguidance matchers in a server. If it would exceed
/// `MATCHER_COPIES_BYTES`, new copies share lexer states instead and are not counted.
#[derive(Debug, Clone, Default)]
pub(super) struct MatcherCopyBudget {
    bytes: Arc<AtomicUsize>,
}

/// Copy of an llguidance matcher; its bytes are counted until it is dropped.
pub(super) struct MatcherCopy {
    pub(super) matcher: Matcher,
    _counted: Option<MatcherCopyReservation>,
}

/// Bytes of one matcher copy, which are subtracted from the counter when the copy is dropped.
struct MatcherCopyReservation {
    copies: MatcherCopyBudget,
    bytes: usize,
}

impl MatcherCopyBudget {
    /// Copies `prototype`, whose size is `bytes`. Above `MATCHER_COPIES_BYTES`, the copy shares its grammar's
    /// lexer states, and the limits on these states, with the other shared copies of the grammar.
    pub(super) fn copy_matcher(&self, prototype: &Matcher, bytes: usize) -> MatcherCopy {
        let bytes_before = self.bytes.fetch_add(bytes, Ordering::Relaxed);
        let counted = MatcherCopyReservation { copies: self.clone(), bytes };
        if bytes_before + bytes > MATCHER_COPIES_BYTES {
            drop(counted);
            return MatcherCopy { matcher: prototype.clone(), _counted: None };
        }
        MatcherCopy { matcher: prototype.deep_clone(), _counted: Some(counted) }
    }

    /// Returns the total size in bytes of all existing deep copies.
    #[cfg(test)]
    pub(super) fn bytes_in_use(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }
}

impl Drop for MatcherCopyReservation {
    fn drop(&mut self) {
        self.copies.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
