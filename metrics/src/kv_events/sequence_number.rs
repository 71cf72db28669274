//! Tracker of the sequence numbers that a subscriber has received from a publisher.

/// Tracks the next sequence number that a subscriber expects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SequenceNumberTracker {
    next: Option<u64>,
}

/// Whether a batch is the next one, a duplicate, or follows a gap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BatchArrival {
    /// The expected batch, or the first batch received.
    Next,
    /// A batch that was received before, or one older than the last received batch.
    Duplicate,
    /// Batches before this one are missing.
    Gap {
        /// Sequence number of the first missing batch.
        from: u64,
    },
}

impl SequenceNumberTracker {
    /// Creates a tracker that has received all batches with sequence numbers below `next`.
    pub fn at(next: u64) -> Self {
        Self { next: Some(next) }
    }

    /// Next expected sequence number; `None` = any number is accepted.
    pub fn next(&self) -> Option<u64> {
        self.next
    }

    /// Classifies a batch by its sequence number. The tracker advances only with `advance`.
    pub fn check(&self, seq: u64) -> BatchArrival {
        match self.next {
            Some(next) if seq < next => BatchArrival::Duplicate,
            Some(next) if seq > next => BatchArrival::Gap { from: next },
            _ => BatchArrival::Next,
        }
    }

    /// Records a batch as received. Missing batches before it are skipped.
    pub fn advance(&mut self, seq: u64) {
        self.next = Some(seq.saturating_add(1));
    }
}
