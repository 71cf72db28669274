//! A subscriber's place in a publisher's sequence.

/// Which batch comes next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SequenceNumberTracker {
    next: Option<u64>,
}

/// What a batch is to a subscriber.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BatchArrival {
    /// The next one, or the first one ever.
    Next,
    /// Seen before.
    Duplicate,
    /// Batches are missing in front of it.
    Gap {
        /// The first of them.
        from: u64,
    },
}

impl SequenceNumberTracker {
    /// A subscriber that has seen everything below `next`.
    pub fn at(next: u64) -> Self {
        Self { next: Some(next) }
    }

    /// The number it waits for; `None` = any.
    pub fn next(&self) -> Option<u64> {
        self.next
    }

    /// Judges a batch; only `take` moves on.
    pub fn check(&self, seq: u64) -> BatchArrival {
        match self.next {
            Some(next) if seq < next => BatchArrival::Duplicate,
            Some(next) if seq > next => BatchArrival::Gap { from: next },
            _ => BatchArrival::Next,
        }
    }

    /// Takes a batch as seen, and everything in front of it as gone.
    pub fn advance(&mut self, seq: u64) {
        self.next = Some(seq.saturating_add(1));
    }
}
