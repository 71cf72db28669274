//! Tracker of the sequence numbers that a subscriber has received from a publisher.

/// Tracks the next expected sequence number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SequenceNumberTracker {
    next: Option<u64>,
}

/// Position of a batch relative to the expected sequence number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BatchArrival {
    /// The expected batch, or the first batch received.
    Next,
    /// A batch received before.
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

    /// Classifies a batch without advancing; `advance` does that.
    pub fn check(&self, seq: u64) -> BatchArrival {
        match self.next {
            Some(next) if seq < next => BatchArrival::Duplicate,
            Some(next) if seq > next => BatchArrival::Gap { from: next },
            _ => BatchArrival::Next,
        }
    }

    /// Records a batch as received; missing batches before it are skipped.
    pub fn advance(&mut self, seq: u64) {
        self.next = Some(seq.saturating_add(1));
    }
}
