//! One publisher's sequence: numbers batches, keeps the last ones, answers replays. No socket, no clock.

use super::announced_blocks::AnnouncedBlocks;
use super::backlog::EventBacklog;
use super::encode::KvEventEncoder;
use protocol::KvEvent;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

/// Most bytes of payload that a ring keeps; who asks for more gets a snapshot.
const RING_BYTES_MAX: usize = 256 << 20;

/// A batch as it was sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublishedBatch {
    /// Its number.
    pub seq: u64,
    /// Its third frame.
    pub payload: Arc<[u8]>,
}

/// The answer to a replay request, made as it is sent: `EventJournal::next_batch` gives its batches, and the end marker
/// follows. It holds no batch of its own but a snapshot that has not been given yet.
#[derive(Debug)]
pub struct ReplayCursor {
    next: u64,
    /// Number after the last batch.
    end: u64,
    snapshot: Option<PublishedBatch>,
    /// Whether it is one batch made for this request, from which a set can be built anew.
    pub is_snapshot: bool,
}

impl ReplayCursor {
    /// Bytes of a snapshot that has not been given yet.
    pub(super) fn snapshot_bytes(&self) -> usize {
        self.snapshot.as_ref().map_or(0, |entry| entry.payload.len())
    }
}

/// Sequence, ring and mirror of one replica.
#[derive(Debug)]
pub struct EventJournal {
    encoder: KvEventEncoder,
    epoch: u64,
    next: u64,
    ring: VecDeque<PublishedBatch>,
    ring_bytes: usize,
    ring_len_max: usize,
    announced: AnnouncedBlocks,
    /// The last one made: whoever else asks before the next batch gets the same.
    snapshot: Option<PublishedBatch>,
}

impl EventJournal {
    /// A journal whose first batch has the number `epoch`; its ring keeps `buffer_steps` batches.
    pub fn new(encoder: KvEventEncoder, epoch: u64, buffer_steps: usize) -> Self {
        let mirror = AnnouncedBlocks::new(encoder.token_ids);
        let ring = VecDeque::new();
        Self {
            encoder,
            epoch,
            next: epoch,
            ring,
            ring_bytes: 0,
            ring_len_max: buffer_steps,
            announced: mirror,
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
    pub fn append(&mut self, ts: f64, events: &[KvEvent]) -> io::Result<PublishedBatch> {
        let payload = self.encoder.batch(ts, events)?;
        for event in events {
            self.announced.apply(event);
        }
        Ok(self.append_numbered(payload))
    }

    /// Makes the next batch of what was missed: a clear, then all blocks.
    ///
    /// Errors: the events cannot be encoded.
    pub fn append_backlog(&mut self, ts: f64, arrears: EventBacklog) -> io::Result<PublishedBatch> {
        self.announced.apply_backlog(arrears);
        let payload = self.encoder.batch(ts, &self.announced.snapshot())?;
        Ok(self.append_numbered(payload))
    }

    fn append_numbered(&mut self, payload: Vec<u8>) -> PublishedBatch {
        let entry = PublishedBatch { seq: self.next, payload: payload.into() };
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
    pub fn replay(&mut self, ts: f64, start: u64) -> io::Result<ReplayCursor> {
        let end = self.next;
        if self.can_replay_from(start) {
            let next = start.max(self.oldest());
            return Ok(ReplayCursor { next, end, snapshot: None, is_snapshot: false });
        }
        let snapshot = Some(self.snapshot(ts)?);
        Ok(ReplayCursor { next: end, end, snapshot, is_snapshot: true })
    }

    /// Whether a replay from `start` on needs no snapshot.
    pub fn can_replay_from(&self, start: u64) -> bool {
        start >= self.oldest() || self.oldest() == self.epoch
    }

    /// Whether the rest of a replay needs a snapshot: the ring has moved on since.
    pub fn needs_snapshot(&self, replay: &ReplayCursor) -> bool {
        replay.next < replay.end && replay.next < self.oldest()
    }

    /// The next batch of a replay. One whose batches have left the ring meanwhile goes on with a snapshot.
    ///
    /// Errors: the snapshot cannot be encoded.
    pub fn next_batch(
        &mut self,
        ts: f64,
        replay: &mut ReplayCursor,
    ) -> io::Result<Option<PublishedBatch>> {
        if let Some(snapshot) = replay.snapshot.take() {
            return Ok(Some(snapshot));
        }
        if self.needs_snapshot(replay) {
            (replay.next, replay.is_snapshot) = (replay.end, true);
            return self.snapshot(ts).map(Some);
        }
        if replay.next >= replay.end {
            return Ok(None);
        }
        let entry = self.ring.get((replay.next - self.oldest()) as usize).cloned();
        replay.next += 1;
        Ok(entry)
    }

    /// Number of the oldest batch in the ring; that of the next one if it is empty.
    fn oldest(&self) -> u64 {
        self.ring.front().map_or(self.next, |entry| entry.seq)
    }

    /// One batch under the last number: a clear, then all blocks. Something has been published.
    fn snapshot(&mut self, ts: f64) -> io::Result<PublishedBatch> {
        let entry = if let Some(snapshot) = self.snapshot.take() {
            snapshot
        } else {
            let payload = self.encoder.batch(ts, &self.announced.snapshot())?.into();
            PublishedBatch { seq: self.next - 1, payload }
        };
        self.snapshot = Some(entry.clone());
        Ok(entry)
    }

    /// Blocks that a subscriber knows who has missed nothing.
    pub fn blocks(&self) -> usize {
        self.announced.len()
    }
}
