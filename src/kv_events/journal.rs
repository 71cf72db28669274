//! One publisher's sequence: numbers batches, keeps the last ones, answers replays. No socket, no clock.

use super::arrears::Arrears;
use super::encode::Encoder;
use super::mirror::Mirror;
use protocol::KvEvent;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

/// Most bytes of payload that a ring keeps; who asks for more gets a snapshot.
const RING_BYTES_MAX: usize = 256 << 20;

/// A batch as it was sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Its number.
    pub seq: u64,
    /// Its third frame.
    pub payload: Arc<[u8]>,
}

/// What a replay request gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Replay {
    /// In order; the end marker follows.
    pub entries: Vec<Entry>,
    /// Whether it is one batch made for this request, from which a set can be built anew.
    pub is_snapshot: bool,
}

/// Sequence, ring and mirror of one replica.
#[derive(Debug)]
pub struct Journal {
    encoder: Encoder,
    epoch: u64,
    next: u64,
    ring: VecDeque<Entry>,
    ring_bytes: usize,
    ring_len_max: usize,
    mirror: Mirror,
    /// The last one made: whoever else asks before the next batch gets the same.
    snapshot: Option<Entry>,
}

impl Journal {
    /// A journal whose first batch has the number `epoch`; its ring keeps `buffer_steps` batches.
    pub fn new(encoder: Encoder, epoch: u64, buffer_steps: usize) -> Self {
        let mirror = Mirror::new(encoder.token_ids);
        let ring = VecDeque::new();
        Self {
            encoder,
            epoch,
            next: epoch,
            ring,
            ring_bytes: 0,
            ring_len_max: buffer_steps,
            mirror,
            snapshot: None,
        }
    }

    /// Number of the first batch.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Number of the last batch; `None` before the first one.
    pub fn last(&self) -> Option<u64> {
        (self.next > self.epoch).then(|| self.next - 1)
    }

    /// Makes the next batch. An epoch's first batch is `[Cleared]`, and its publisher says so.
    ///
    /// Errors: the events cannot be encoded; nothing has changed then.
    pub fn append(&mut self, ts: f64, events: &[KvEvent]) -> io::Result<Entry> {
        let payload = self.encoder.batch(ts, events)?;
        for event in events {
            self.mirror.apply(event);
        }
        Ok(self.number(payload))
    }

    /// Makes the next batch of what was missed: a clear, then all blocks.
    ///
    /// Errors: the events cannot be encoded.
    pub fn catch_up(&mut self, ts: f64, arrears: Arrears) -> io::Result<Entry> {
        self.mirror.settle(arrears);
        let payload = self.encoder.batch(ts, &self.mirror.snapshot())?;
        Ok(self.number(payload))
    }

    fn number(&mut self, payload: Vec<u8>) -> Entry {
        let entry = Entry { seq: self.next, payload: payload.into() };
        self.next += 1;
        self.snapshot = None;
        self.ring_bytes += entry.payload.len();
        self.ring.push_back(entry.clone());
        while self.ring.len() > self.ring_len_max || self.ring_bytes > RING_BYTES_MAX {
            let Some(oldest) = self.ring.pop_front() else { break };
            self.ring_bytes -= oldest.payload.len();
        }
        entry
    }

    /// Everything from number `start` on, or all there is to know if that is gone.
    ///
    /// Errors: a snapshot cannot be encoded.
    pub fn replay(&mut self, ts: f64, start: u64) -> io::Result<Replay> {
        let oldest = self.ring.front().map_or(self.next, |entry| entry.seq);
        if start >= oldest || oldest == self.epoch {
            let skipped = start.saturating_sub(oldest).min(self.ring.len() as u64) as usize;
            let entries = self.ring.range(skipped..).cloned().collect();
            return Ok(Replay { entries, is_snapshot: false });
        }
        let seq = self.next - 1; // The ring has moved on, so something was published.
        let entry = if let Some(snapshot) = self.snapshot.take() {
            snapshot
        } else {
            let payload = self.encoder.batch(ts, &self.mirror.snapshot())?.into();
            Entry { seq, payload }
        };
        self.snapshot = Some(entry.clone());
        Ok(Replay { entries: vec![entry], is_snapshot: true })
    }

    /// Blocks that a subscriber knows who has missed nothing.
    pub fn blocks(&self) -> usize {
        self.mirror.len()
    }
}
