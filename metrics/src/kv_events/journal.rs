//! Journal of one publisher: numbers batches, keeps recent ones and provides them for replays. Uses no socket
//! and no clock.

use super::announced_blocks::AnnouncedBlocks;
use super::backlog::EventBacklog;
use super::encode::KvEventEncoder;
use protocol::KvEvent;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

/// Maximum payload bytes of the recent batches kept in the ring. A replay that needs batches evicted from the
/// ring gets a snapshot (all announced blocks).
const RING_BYTES_MAX: usize = 256 << 20;

/// Batch of events as it is published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublishedBatch {
    /// Sequence number of the batch.
    pub seq: u64,
    /// Payload, which is the third frame of the ZMQ message.
    pub payload: Arc<[u8]>,
}

/// Progress of a replay. `EventJournal::next_batch` returns its batches; the end marker follows them. The
/// cursor stores no batches, except a snapshot that has not been returned yet.
#[derive(Debug)]
pub struct ReplayCursor {
    next: u64,
    /// One more than the sequence number of the replay's last batch.
    end: u64,
    snapshot: Option<PublishedBatch>,
    /// Whether the replay is, or has continued with, a snapshot: one batch from which a subscriber can
    /// rebuild its block set.
    pub is_snapshot: bool,
}

impl ReplayCursor {
    /// Payload bytes of a snapshot that has not been returned yet.
    pub(super) fn snapshot_bytes(&self) -> usize {
        self.snapshot.as_ref().map_or(0, |batch| batch.payload.len())
    }
}

/// Journal of one replica's events: next sequence number, ring of recent batches and set of announced blocks.
#[derive(Debug)]
pub struct EventJournal {
    encoder: KvEventEncoder,
    epoch: u64,
    next: u64,
    ring: VecDeque<PublishedBatch>,
    ring_bytes: usize,
    ring_len_max: usize,
    announced: AnnouncedBlocks,
    /// Latest snapshot, reused by further replay requests until the next batch is appended.
    snapshot: Option<PublishedBatch>,
}

impl EventJournal {
    /// Creates a journal with `epoch` as its first sequence number and a ring of `buffer_steps` batches.
    pub fn new(encoder: KvEventEncoder, epoch: u64, buffer_steps: usize) -> Self {
        let announced = AnnouncedBlocks::new(encoder.token_ids);
        let ring = VecDeque::new();
        Self {
            encoder,
            epoch,
            next: epoch,
            ring,
            ring_bytes: 0,
            ring_len_max: buffer_steps,
            announced,
            snapshot: None,
        }
    }

    /// Epoch of the journal: the sequence number of its first batch.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Sequence number of the last batch; `None` before the first one.
    pub fn last(&self) -> Option<u64> {
        (self.next > self.epoch).then(|| self.next - 1)
    }

    /// Creates the next batch. The caller must ensure that the first batch of an epoch is `[Cleared]`.
    ///
    /// Errors: the events cannot be encoded; the journal is unchanged.
    pub fn append(&mut self, ts: f64, events: &[KvEvent]) -> io::Result<PublishedBatch> {
        let payload = self.encoder.batch(ts, events)?;
        for event in events {
            self.announced.apply(event);
        }
        Ok(self.append_numbered(payload))
    }

    /// Creates the next batch from a backlog: a clear, then all announced blocks.
    ///
    /// Errors: the events cannot be encoded.
    pub fn append_backlog(&mut self, ts: f64, backlog: EventBacklog) -> io::Result<PublishedBatch> {
        self.announced.apply_backlog(backlog);
        let payload = self.encoder.batch(ts, &self.announced.snapshot())?;
        Ok(self.append_numbered(payload))
    }

    fn append_numbered(&mut self, payload: Vec<u8>) -> PublishedBatch {
        let batch = PublishedBatch { seq: self.next, payload: payload.into() };
        self.next += 1;
        self.snapshot = None;
        self.ring_bytes += batch.payload.len();
        self.ring.push_back(batch.clone());
        while self.ring.len() > self.ring_len_max || self.ring_bytes > RING_BYTES_MAX {
            let Some(oldest) = self.ring.pop_front() else { break };
            self.ring_bytes -= oldest.payload.len();
        }
        batch
    }

    /// Starts a replay from sequence number `start`. If the batch with this number has left the ring, the
    /// replay consists of a snapshot.
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

    /// Whether the ring has all published batches from `start` on, so that a replay needs no snapshot.
    pub fn can_replay_from(&self, start: u64) -> bool {
        start >= self.oldest() || self.oldest() == self.epoch
    }

    /// Whether the rest of a replay needs a snapshot, because its next batch has left the ring.
    pub fn needs_snapshot(&self, replay: &ReplayCursor) -> bool {
        replay.next < replay.end && replay.next < self.oldest()
    }

    /// Returns the next batch of a replay. If that batch has left the ring, the replay continues with a
    /// snapshot.
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
        let batch = self.ring.get((replay.next - self.oldest()) as usize).cloned();
        replay.next += 1;
        Ok(batch)
    }

    /// Returns the sequence number of the oldest batch in the ring, or of the next batch if the ring is
    /// empty.
    fn oldest(&self) -> u64 {
        self.ring.front().map_or(self.next, |batch| batch.seq)
    }

    /// Returns a snapshot: a batch with a clear and all announced blocks. It has the sequence number of the
    /// last batch, so at least one batch must have been published.
    fn snapshot(&mut self, ts: f64) -> io::Result<PublishedBatch> {
        let batch = if let Some(snapshot) = self.snapshot.take() {
            snapshot
        } else {
            let payload = self.encoder.batch(ts, &self.announced.snapshot())?.into();
            PublishedBatch { seq: self.next - 1, payload }
        };
        self.snapshot = Some(batch.clone());
        Ok(batch)
    }

    /// Number of announced blocks; a subscriber that has missed no event has a block set of the same size.
    pub fn blocks(&self) -> usize {
        self.announced.len()
    }
}
