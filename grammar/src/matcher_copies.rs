//! Memory accounting of matcher copies: each running request has its own copy as long as the copies fit in
//! the limit.

use super::limits::MATCHER_COPIES_BYTES;
use llguidance::Matcher;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Byte budget of the matcher copies of a server: counts their total size in bytes. Above the budget,
/// copies share lexer states.
#[derive(Debug, Clone, Default)]
pub(super) struct MatcherCopyBudget {
    bytes: Arc<AtomicUsize>,
}

/// Copy of a matcher, with its entry in the byte counter.
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

    /// Returns the total size of all existing copies in bytes.
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
