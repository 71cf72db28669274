//! The newest steps, one by one: written by one thread without waiting, read by anybody.
//!
//! Each place carries a number that is odd while it is written. A reader takes a place only if its number
//! was the expected one before and after; a place that was overtaken meanwhile is left out.

use serde::Serialize;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Steps that are kept.
pub const STEPS_KEPT: usize = 1_024;

/// One step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct StepTimingRecord {
    /// DP rank of the replica.
    #[serde(rename = "dp_rank")]
    pub replica: u64,
    /// Number of the step, of this replica.
    pub step: u64,
    /// When it was sent, in milliseconds since the server's start.
    pub sent_ms: u64,
    /// Rows of one token.
    pub decode_rows: u64,
    /// Rows of several.
    pub prefill_rows: u64,
    /// Tokens forwarded.
    pub tokens: u64,
    /// Tokens of prompts, each times the context at the end of its row: what attention multiplies.
    pub prompt_pairs: u64,
    /// How long the step might take when it was sent, before it counted as late.
    pub allowed_ms: u64,
    /// Requests with a seat when it was answered.
    pub running: u64,
    /// Requests without one.
    pub waiting: u64,
    /// Deciding.
    pub plan_ns: u64,
    /// Taking blocks, writing the batch.
    pub commit_ns: u64,
    /// Taking in what had arrived before.
    pub apply_ns: u64,
    /// Handing the batch over.
    pub send_ns: u64,
    /// From there, or from the former step's answer, to the answer.
    pub wait_ns: u64,
    /// The executor's own account.
    pub device_ns: u64,
    /// 1 if it was a replay of a captured graph.
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
            self.allowed_ms,
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

    fn of(words: [u64; RECORD_WORDS]) -> Self {
        let [
            replica,
            step,
            sent_ms,
            decode_rows,
            prefill_rows,
            tokens,
            prompt_pairs,
            allowed_ms,
            running,
            waiting,
            plan_ns,
            commit_ns,
            apply_ns,
            send_ns,
            wait_ns,
            device_ns,
            replayed,
        ] = words;
        Self {
            replica,
            step,
            sent_ms,
            decode_rows,
            prefill_rows,
            tokens,
            prompt_pairs,
            allowed_ms,
            running,
            waiting,
            plan_ns,
            commit_ns,
            apply_ns,
            send_ns,
            wait_ns,
            device_ns,
            replayed,
        }
    }
}

#[derive(Debug, Default)]
struct StepRingEntry {
    version: AtomicU64,
    words: [AtomicU64; RECORD_WORDS],
}

/// The places.
#[derive(Debug)]
pub struct StepRing {
    entries: Vec<StepRingEntry>,
    /// Steps pushed so far.
    count: AtomicU64,
}

impl Default for StepRing {
    fn default() -> Self {
        let places = (0..STEPS_KEPT).map(|_| StepRingEntry::default()).collect();
        Self { entries: places, count: AtomicU64::new(0) }
    }
}

impl StepRing {
    /// Adds a step in place of the oldest. Call it on one thread only.
    pub fn push(&self, record: &StepTimingRecord) {
        let count = self.count.load(Ordering::Relaxed);
        let place = &self.entries[count as usize % STEPS_KEPT];
        place.version.store(2 * count + 1, Ordering::Relaxed);
        fence(Ordering::Release);
        for (to, word) in place.words.iter().zip(record.to_words()) {
            to.store(word, Ordering::Relaxed);
        }
        place.version.store(2 * count + 2, Ordering::Release);
        self.count.store(count + 1, Ordering::Release);
    }

    /// The newest `most` steps, oldest first; fewer if some are overwritten meanwhile.
    pub fn newest(&self, most: usize) -> Vec<StepTimingRecord> {
        let end = self.count.load(Ordering::Acquire);
        let start = end.saturating_sub(most.min(STEPS_KEPT) as u64);
        (start..end).filter_map(|count| self.read(count)).collect()
    }

    fn read(&self, count: u64) -> Option<StepTimingRecord> {
        let place = &self.entries[count as usize % STEPS_KEPT];
        let expected = 2 * count + 2;
        if place.version.load(Ordering::Acquire) != expected {
            return None;
        }
        let words = std::array::from_fn(|i| place.words[i].load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        (place.version.load(Ordering::Relaxed) == expected).then(|| StepTimingRecord::of(words))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    fn record(step: u64) -> StepTimingRecord {
        StepTimingRecord::of([step; RECORD_WORDS])
    }

    #[test]
    fn step_ring_keeps_the_newest_in_order() {
        let ring = StepRing::default();
        assert!(ring.newest(10).is_empty());
        for step in 0..STEPS_KEPT as u64 + 5 {
            ring.push(&record(step));
        }
        let steps: Vec<u64> = ring.newest(3).iter().map(|r| r.step).collect();
        assert_eq!(steps, [1026, 1027, 1028]);
        let all = ring.newest(usize::MAX);
        assert_eq!((all.len(), all[0].step), (STEPS_KEPT, 5));
    }

    #[test]
    fn reader_never_sees_a_torn_record() {
        let ring = Arc::new(StepRing::default());
        let writer = {
            let ring = Arc::clone(&ring);
            std::thread::spawn(move || (1..200_000).for_each(|step| ring.push(&record(step))))
        };
        let mut seen = 0;
        while !writer.is_finished() || seen == 0 {
            let steps = ring.newest(STEPS_KEPT);
            assert!(steps.iter().all(|r| r.to_words() == [r.step; RECORD_WORDS]), "torn");
            assert!(steps.is_sorted_by_key(|r| r.step));
            seen += steps.len();
        }
        writer.join().unwrap();
    }
}
