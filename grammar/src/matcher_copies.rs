//! The memory of grammars in use: each running request follows a copy of its own, as long as there is room for it.

use super::limits::MATCHER_COPIES_BYTES;
use llguidance::Matcher;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes of all copies of one server.
#[derive(Debug, Clone, Default)]
pub(super) struct MatcherCopies {
    bytes: Arc<AtomicUsize>,
}

/// A matcher, and what it is counted as.
pub(super) struct MatcherCopy {
    pub(super) matcher: Matcher,
    _counted: Option<MatcherCopyBytes>,
}

struct MatcherCopyBytes {
    copies: MatcherCopies,
    bytes: usize,
}

impl MatcherCopies {
    /// A copy of `prototype`, which takes `bytes`. Once there are too many, copies share what they find out about
    /// their grammar with all others of it, and with it what that may cost.
    pub(super) fn copy_of(&self, prototype: &Matcher, bytes: usize) -> MatcherCopy {
        let held = self.bytes.fetch_add(bytes, Ordering::Relaxed);
        let counted = MatcherCopyBytes { copies: self.clone(), bytes };
        if held + bytes > MATCHER_COPIES_BYTES {
            drop(counted);
            return MatcherCopy { matcher: prototype.clone(), _counted: None };
        }
        MatcherCopy { matcher: prototype.deep_clone(), _counted: Some(counted) }
    }

    /// Bytes of the copies there are.
    #[cfg(test)]
    pub(super) fn bytes_in_use(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }
}

impl Drop for MatcherCopyBytes {
    fn drop(&mut self) {
        self.copies.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
