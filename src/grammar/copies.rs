//! The memory of grammars in use: each running request follows a copy of its own, as long as there is room for it.

use super::limits::COPIES_BYTES;
use llguidance::Matcher;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes of all copies of one server.
#[derive(Debug, Clone, Default)]
pub(super) struct Copies {
    bytes: Arc<AtomicUsize>,
}

/// A matcher, and what it is counted as.
pub(super) struct Own {
    pub(super) matcher: Matcher,
    _counted: Option<Counted>,
}

struct Counted {
    copies: Copies,
    bytes: usize,
}

impl Copies {
    /// A copy of `prototype`, which takes `bytes`. Once there are too many, copies share what they find out about
    /// their grammar with all others of it, and with it what that may cost.
    pub(super) fn of(&self, prototype: &Matcher, bytes: usize) -> Own {
        let held = self.bytes.fetch_add(bytes, Ordering::Relaxed);
        let counted = Counted { copies: self.clone(), bytes };
        if held + bytes > COPIES_BYTES {
            drop(counted);
            return Own { matcher: prototype.clone(), _counted: None };
        }
        Own { matcher: prototype.deep_clone(), _counted: Some(counted) }
    }

    /// Bytes of the copies there are.
    #[cfg(test)]
    pub(super) fn held(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.copies.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
