//! ROUTER socket: serves replay requests, one at a time per peer, as fast as the peer receives the response.

use super::journal::{EventJournal, PublishedBatch, ReplayCursor};
use super::pace::ReplayRateMonitor;
use super::publisher_counters::{PublisherCounters, count};
use super::zmtp::{
    OutgoingMessage, PeerError, PeerListener, PeerState, PeerTable, TransmitResult, ZmtpFrameHead,
    ZmtpPeer, ZmtpSocketType, frame_header, put_frame,
};
use rustix::event::PollFd;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum number of peers that are connected.
const PEERS_MAX: usize = 64;
/// Maximum bytes kept of a frame; the longest expected frame is READY with an identity and properties.
const BODY_BYTES_MAX: usize = 1 << 10;
/// Maximum bytes sent to a peer before the publisher thread processes new batches and other peers.
const BYTES_PER_TURN: usize = 1 << 20;
/// Maximum number of snapshots that are sent at the same time. At the maximum, a new request that needs a
/// snapshot waits, and the connection of a running replay that needs one (its next batch has left the ring)
/// is closed.
const SNAPSHOTS_MAX: usize = 4;
/// Time that a peer has to receive a snapshot, in addition to `SNAPSHOT_TIME_PER_MIB` for each MiB.
const SNAPSHOT_TIME: Duration = Duration::from_secs(30);
const SNAPSHOT_TIME_PER_MIB: Duration = Duration::from_secs(4);
/// Sequence number of the message that marks the end of a replay.
const END: [u8; 8] = [0xff; 8];

/// Parser of the frames of a replay request; keeps only the sequence number from which
/// batches are replayed.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ReplayRequestReader {
    /// Number of frames of the current message that were received so far.
    frames: u64,
    start: Option<u64>,
    is_malformed: bool,
}

/// Replay request, parsed from the frames of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplayRequest {
    /// The peer requests all batches from this sequence number on.
    From(u64),
    /// The message is not an empty frame followed by a big-endian 64-bit number.
    Malformed,
}

impl ReplayRequestReader {
    /// Processes a frame. Returns the replay request when the frames of its message are complete.
    pub fn take(&mut self, head: ZmtpFrameHead, body: &[u8]) -> Option<ReplayRequest> {
        if head.is_command {
            return None;
        }
        match self.frames {
            0 => self.is_malformed = !(body.is_empty() && head.is_body_complete),
            1 => self.start = body.try_into().ok().map(u64::from_be_bytes),
            _ => self.is_malformed = true,
        }
        self.frames += 1;
        if head.has_more {
            return None;
        }
        let Self { start, is_malformed, .. } = std::mem::take(self);
        Some(start.filter(|_| !is_malformed).map_or(ReplayRequest::Malformed, ReplayRequest::From))
    }
}

/// Replay request and response of one peer.
#[derive(Debug, Default)]
struct ReplayPeer {
    frames: ReplayRequestReader,
    /// First sequence number of a requested replay whose response has not started.
    requested: Option<u64>,
    response: Option<ReplayResponse>,
}

/// Replay response that is being sent to a peer.
#[derive(Debug)]
struct ReplayResponse {
    replay: ReplayCursor,
    pace: ReplayRateMonitor,
    /// Error in encoding a snapshot, which ends the response and the connection.
    failure: Option<io::Error>,
    /// Whether the end marker has been queued.
    is_complete: bool,
    /// Deadline by which the peer must have received a snapshot; `None` = the response contains no snapshot.
    deadline: Option<SnapshotDeadline>,
}

/// Time by which a peer must have received a snapshot, and the time limit from which it was computed.
#[derive(Debug)]
struct SnapshotDeadline {
    at: Instant,
    after: Duration,
}

impl PeerState for ReplayPeer {
    fn is_idle(&self) -> bool {
        self.reads()
    }

    fn reads(&self) -> bool {
        self.requested.is_none() && self.response.is_none()
    }
}

/// Data from which replay responses are made.
pub(super) struct ReplayContext<'a> {
    /// Journal that provides batches and snapshots.
    pub(super) journal: &'a mut EventJournal,
    /// Counters of the publisher.
    pub(super) counters: &'a PublisherCounters,
    /// Current time in seconds of Unix time.
    pub(super) ts: f64,
}

/// Socket on which peers request replays.
pub(super) struct ReplaySocket {
    peers: PeerTable<ReplayPeer>,
    topic: Vec<u8>,
}

impl ReplaySocket {
    pub(super) fn new(listener: PeerListener, topic: &str) -> Self {
        let peers =
            PeerTable::new(ZmtpSocketType::Router, Some(listener), PEERS_MAX, BODY_BYTES_MAX);
        Self { peers, topic: topic.as_bytes().to_vec() }
    }

    /// Processes requests and sends pending responses. Returns whether more work can be done at once.
    pub(super) fn poll(&mut self, now: Instant, context: &mut ReplayContext<'_>) -> bool {
        self.peers.accept(now, context.counters);
        let mut snapshots = self.snapshots();
        let (topic, mut more) = (&self.topic, false);
        let counters = context.counters;
        self.peers.serve(counters, |peer| {
            take_request(peer, now, counters)?;
            start_response(peer, now, context, &mut snapshots)?;
            let Some(response) = &mut peer.state.response else {
                return peer.connection.transmit(BYTES_PER_TURN, || None).map(drop);
            };
            response.pace.check(now, peer.connection.sent_bytes())?;
            if let Some(SnapshotDeadline { at, after }) = response.deadline
                && now >= at
            {
                return Err(PeerError::TimedOut { what: "a snapshot was not received", after });
            }
            if response.deadline.is_none() && context.journal.needs_snapshot(&response.replay) {
                // The next batch of the replay has left the ring, so the replay continues with a snapshot
                // after the batch that is being sent.
                if snapshots >= SNAPSHOTS_MAX {
                    return Err(PeerError::NoCapacity(SNAPSHOTS_MAX));
                }
                snapshots += 1;
                response.set_deadline(now, 0);
            }
            let next = || next_message(response, now, context, topic);
            let transmitted = peer.connection.transmit(BYTES_PER_TURN, next)?;
            if let Some(error) = response.failure.take() {
                // Don't send the end marker, because it means that the peer has received all batches.
                return Err(PeerError::Encode(error));
            }
            match transmitted {
                TransmitResult::All => {
                    peer.state.response = None;
                    more = true; // Another request may be pending.
                }
                TransmitResult::Budget => more = true,
                TransmitResult::Blocked => {}
            }
            Ok(())
        });
        more
    }

    fn snapshots(&self) -> usize {
        let responses = self.peers.iter().filter_map(|peer| peer.state.response.as_ref());
        responses.filter(|response| response.deadline.is_some()).count()
    }

    /// Adds the file descriptors of the socket to `polled`. Returns whether the publisher thread must also
    /// wake periodically, because a peer has a deadline, is throttled or waits for a response.
    pub(super) fn add_poll_fds<'a>(&'a self, polled: &mut Vec<PollFd<'a>>) -> bool {
        self.peers.add_poll_fds(polled) | self.peers.iter().any(|peer| !peer.state.reads())
    }
}

/// Reads frames up to the next replay request, unless a previous request is unfinished.
fn take_request(
    peer: &mut ZmtpPeer<ReplayPeer>,
    now: Instant,
    counters: &PublisherCounters,
) -> Result<(), PeerError> {
    while peer.state.reads() {
        let Some(head) = peer.connection.next_frame(now)? else { break };
        match peer.state.frames.take(head, peer.connection.body()) {
            Some(ReplayRequest::From(start)) => peer.state.requested = Some(start),
            Some(ReplayRequest::Malformed) => count(&counters.malformed, 1),
            None => {}
        }
    }
    Ok(())
}

/// Starts the response to a waiting request, unless it needs a snapshot and the maximum number of snapshots
/// is being sent.
///
/// Errors: a snapshot cannot be encoded.
fn start_response(
    peer: &mut ZmtpPeer<ReplayPeer>,
    now: Instant,
    context: &mut ReplayContext<'_>,
    snapshots: &mut usize,
) -> Result<(), PeerError> {
    let ReplayContext { journal, counters, ts } = context;
    let fits = |start: &mut u64| journal.can_replay_from(*start) || *snapshots < SNAPSHOTS_MAX;
    let Some(start) = peer.state.requested.take_if(fits) else { return Ok(()) };
    let replay = journal.replay(*ts, start).map_err(|error| {
        count(&counters.errors, 1);
        PeerError::Encode(error)
    })?;
    count(&counters.replays, 1);
    let pace = ReplayRateMonitor::new(now, peer.connection.sent_bytes());
    let mut response =
        ReplayResponse { replay, pace, failure: None, is_complete: false, deadline: None };
    if response.replay.is_snapshot {
        count(&counters.snapshots, 1);
        *snapshots += 1;
        response.set_deadline(now, response.replay.snapshot_bytes());
    }
    peer.state.response = Some(response);
    Ok(())
}

impl ReplayResponse {
    fn set_deadline(&mut self, now: Instant, bytes: usize) {
        let mib = u32::try_from(bytes >> 20).unwrap_or(u32::MAX);
        let after = SNAPSHOT_TIME + SNAPSHOT_TIME_PER_MIB.saturating_mul(mib);
        self.deadline = Some(SnapshotDeadline { at: now + after, after });
    }
}

/// Returns the next message of a response; `None` after the end marker or after an error.
fn next_message(
    response: &mut ReplayResponse,
    now: Instant,
    context: &mut ReplayContext<'_>,
    topic: &[u8],
) -> Option<Arc<OutgoingMessage>> {
    if response.is_complete {
        return None;
    }
    let ReplayContext { journal, counters, ts } = context;
    let was_snapshot = response.replay.is_snapshot;
    let batch = match journal.next_batch(*ts, &mut response.replay) {
        Ok(batch) => batch,
        Err(error) => {
            count(&counters.errors, 1);
            response.failure = Some(error);
            return None;
        }
    };
    let Some(PublishedBatch { seq, payload }) = batch else {
        response.is_complete = true;
        return Some(message(b"", END, Arc::default()));
    };
    if response.replay.is_snapshot && !was_snapshot {
        count(&counters.snapshots, 1);
        response.set_deadline(now, payload.len());
    }
    count(&counters.replayed, 1);
    Some(message(topic, seq.to_be_bytes(), payload))
}

fn message(topic: &[u8], seq: [u8; 8], payload: Arc<[u8]>) -> Arc<OutgoingMessage> {
    let mut head = Vec::with_capacity(topic.len() + 32);
    put_frame(true, b"", &mut head);
    put_frame(true, topic, &mut head);
    put_frame(true, &seq, &mut head);
    frame_header(false, payload.len(), &mut head);
    Arc::new(OutgoingMessage { head, payload })
}

#[cfg(test)]
mod tests;
