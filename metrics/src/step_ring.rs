//! Ring of the timing records of the newest steps: written by one thread without blocking, readable from any
//! thread.
//!
//! Each entry is a seqlock: its version is odd while it is written. A reader uses an entry only if the
//! version has the expected value before and after the read; an entry that was overwritten meanwhile is
//! skipped.

use serde::Serialize;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Number of timing records in the ring.
pub const STEP_RING_CAPACITY: usize = 1_024;

/// Timing record of one step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct StepTimingRecord {
    /// DP rank of the replica.
    #[serde(rename = "dp_rank")]
    pub replica: u64,
    /// Number of the step within its replica.
    pub step: u64,
    /// Time at which the batch was sent, in milliseconds since the server's start.
    pub sent_ms: u64,
    /// Number of rows with one token (decode).
    pub decode_rows: u64,
    /// Number of rows with several tokens (prefill).
    pub prefill_rows: u64,
    /// Number of tokens in the forward pass.
    pub tokens: u64,
    /// Attention work of prefill: sum over the prefill rows of the number of tokens times the context length
    /// at the end of the row.
    pub prompt_pairs: u64,
    /// Deadline of the step, as set when it was sent, in milliseconds.
    #[serde(rename = "allowed_ms")]
    pub deadline_ms: u64,
    /// Number of running requests when the output of the step was received.
    pub running: u64,
    /// Number of waiting requests when the output of the step was received.
    pub waiting: u64,
    /// Time to plan the step, in nanoseconds.
    pub plan_ns: u64,
    /// Time to allocate blocks and write the batch, in nanoseconds.
    pub commit_ns: u64,
    /// Time to process earlier events (outputs, submissions), in nanoseconds.
    pub apply_ns: u64,
    /// Time to send the batch, in nanoseconds.
    pub send_ns: u64,
    /// Time from the send, or from the output of the previous step if that was later, to the output of this
    /// step, in nanoseconds.
    pub wait_ns: u64,
    /// Duration of the step as measured by the executor, in nanoseconds.
    pub device_ns: u64,
    /// 1 if the step replayed a captured graph, else 0.
    pub replayed: u64,
}

const RECORD_WORDS: usize = 17;

impl StepTimingRecord {
    fn to_words(self) -> [u64; RECORD_WORDS] {
        [
            self.replica,
            self.step,
            self.sent_ms,
            self.decode_rows,
            self.prefill_rows,
            self.tokens,
            self.prompt_pairs,
            self.deadline_ms,
            self.running,
            self.waiting,
            self.plan_ns,
            self.commit_ns,
            self.apply_ns,
            self.send_ns,
            self.wait_ns,
            self.device_ns,
            self.replayed,
        ]
    }

    fn from_words(words: [u64; RECORD_WORDS]) -> Self {
        Self {
            replica: words[0],
            step: words[1],
            sent_ms: words[2],
            decode_rows: words[3],
            prefill_rows: words[4],
            tokens: words[5],
            prompt_pairs: words[6],
            deadline_ms: words[7],
            running: words[8],
            waiting: words[9],
            plan_ns: words[10],
            commit_ns: words[11],
            apply_ns: words[12],
            send_ns: words[13],
            wait_ns: words[14],
            device_ns: words[15],
            replayed: words[16],
        }
    }
}

/// Entry of the ring: a timing record with a version number, which is odd while the record is being written.
#[derive(Debug, Default)]
struct StepTimingEntry {
    version: AtomicU64,
    words: [AtomicU64; RECORD_WORDS],
}

/// Ring of the timing records of the newest steps.
#[derive(Debug)]
pub struct StepTimingRing {
    entries: Vec<StepTimingEntry>,
    /// Number of records pushed so far; modulo the capacity, the entry of the next record.
    count: AtomicU64,
}

impl Default for StepTimingRing {
    fn default() -> Self {
        let entries = (0..STEP_RING_CAPACITY).map(|_| StepTimingEntry::default()).collect();
        Self { entries, count: AtomicU64::new(0) }
    }
}

impl StepTimingRing {
    /// Adds a record, replacing the oldest one. Must be called from one thread only.
    pub fn push(&self, record: &StepTimingRecord) {
        let count = self.count.load(Ordering::Relaxed);
        let entry = &self.entries[count as usize % STEP_RING_CAPACITY];
        entry.version.store(2 * count + 1, Ordering::Relaxed);
        fence(Ordering::Release);
        for (stored, word) in entry.words.iter().zip(record.to_words()) {
            stored.store(word, Ordering::Relaxed);
        }
        entry.version.store(2 * count + 2, Ordering::Release);
        self.count.store(count + 1, Ordering::Release);
    }

    /// Returns the newest `max` records, oldest first; fewer if some are overwritten meanwhile.
    pub fn newest(&self, max: usize) -> Vec<StepTimingRecord> {
        let end = self.count.load(Ordering::Acquire);
        let start = end.saturating_sub(max.min(STEP_RING_CAPACITY) as u64);
        (start..end).filter_map(|count| self.read(count)).collect()
    }

    fn read(&self, count: u64) -> Option<StepTimingRecord> {
        let entry = &self.entries[count as usize % STEP_RING_CAPACITY];
        let expected = 2 * count + 2;
        if entry.version.load(Ordering::Acquire) != expected {
            return None;
        }
        let words = std::array::from_fn(|i| entry.words[i].load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        (entry.version.load(Ordering::Relaxed) == expected)
            .then(|| StepTimingRecord::from_words(words))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::deadlines::BoundedJoin as _;
    use std::sync::Arc;

    fn record(step: u64) -> StepTimingRecord {
        StepTimingRecord::from_words([step; RECORD_WORDS])
    }

    #[test]
    fn step_ring_keeps_the_newest_in_order() {
        let ring = StepTimingRing::default();
        assert!(ring.newest(10).is_empty());
        for step in 0..STEP_RING_CAPACITY as u64 + 5 {
            ring.push(&record(step));
        }
        let steps: Vec<u64> = ring.newest(3).iter().map(|r| r.step).collect();
        assert_eq!(steps, [1026, 1027, 1028]);
        let all = ring.newest(usize::MAX);
        assert_eq!((all.len(), all[0].step), (STEP_RING_CAPACITY, 5));
    }

    #[test]
    fn record_round_trips_through_its_words() {
        let words = std::array::from_fn(|i| i as u64);
        assert_eq!(StepTimingRecord::from_words(words).to_words(), words);
    }

    #[test]
    fn reader_never_sees_a_torn_record() {
        let ring = Arc::new(StepTimingRing::default());
        let writer = {
            let ring = Arc::clone(&ring);
            std::thread::spawn(move || (1..200_000).for_each(|step| ring.push(&record(step))))
        };
        let mut seen = 0;
        while !writer.is_finished() || seen == 0 {
            let steps = ring.newest(STEP_RING_CAPACITY);
            assert!(steps.iter().all(|r| r.to_words() == [r.step; RECORD_WORDS]), "torn");
            assert!(steps.is_sorted_by_key(|r| r.step));
            seen += steps.len();
        }
        writer.join_bounded();
    }
}
