//! PUB socket: sends batches to each subscriber of the topic, as fast as the subscriber receives them.

use super::config::KvEventsConfig;
use super::message_ring::MessageRing;
use super::publisher_counters::{PublisherCounters, count};
use super::zmtp::{
    CollectorConnector, OutgoingMessage, PeerAddress, PeerError, PeerListener, PeerState,
    PeerTable, TransmitResult, ZmtpConnection, ZmtpFrameHead, ZmtpSocketType, frame_header,
    put_frame,
};
use rustix::event::PollFd;
use std::collections::BTreeSet;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Maximum number of subscribers that are connected.
const SUBSCRIBERS_MAX: usize = 256;
/// Maximum bytes kept of a peer's frame, in addition to the topic length. The longest expected frame is READY
/// with an identity and properties.
const BODY_BYTES: usize = 1 << 10;
/// Maximum bytes sent to a subscriber before the publisher thread sends to other subscribers.
const BYTES_PER_TURN: usize = 4 << 20;
/// Maximum size of a message that is kept, after its eviction from the ring, for a subscriber that has
/// received only a part of it. The connection of such a subscriber is closed if the message is larger.
const DETACHED_BYTES_MAX: usize = 1 << 20;
/// Poll interval while `flush` waits for subscribers.
const FLUSH_POLL: Duration = Duration::from_millis(1);

/// Subscriptions of a subscriber. They are compared with the publisher's only topic: other subscriptions
/// match nothing and are not kept.
#[derive(Debug, Default)]
struct SubscriberState {
    /// Lengths of the subscribed prefixes of the topic.
    prefixes: BTreeSet<usize>,
    /// Position in the message ring of the next message that is sent to the subscriber.
    position: u64,
    /// Whether the next frame continues a message of several frames.
    is_within_message: bool,
}

impl PeerState for SubscriberState {
    fn is_idle(&self) -> bool {
        self.prefixes.is_empty()
    }

    fn reads(&self) -> bool {
        true
    }
}

impl SubscriberState {
    /// Processes a frame of a subscriber. Returns whether it is ignored: a subscription that does not match
    /// the topic, or a frame that was too long to be kept.
    fn take(&mut self, head: ZmtpFrameHead, body: &[u8], topic: &[u8], end: u64) -> bool {
        let begins =
            !std::mem::replace(&mut self.is_within_message, head.has_more && !head.is_command);
        let subscription = if head.is_command {
            let subscribe = body.strip_prefix(b"\x09SUBSCRIBE").map(|prefix| (true, prefix));
            subscribe.or_else(|| body.strip_prefix(b"\x06CANCEL").map(|prefix| (false, prefix)))
        } else {
            match body.split_first() {
                Some((1, prefix)) if begins => Some((true, prefix)),
                Some((0, prefix)) if begins => Some((false, prefix)),
                _ => None,
            }
        };
        match subscription {
            Some((_, prefix)) if !topic.starts_with(prefix) => return true,
            Some((true, prefix)) => {
                if self.prefixes.is_empty() {
                    self.position = end;
                }
                self.prefixes.insert(prefix.len());
            }
            Some((false, prefix)) => {
                self.prefixes.remove(&prefix.len());
            }
            None => return !head.is_body_complete,
        }
        false
    }
}

/// How the PUB socket and its subscribers connect.
pub(super) enum PubSocketMode {
    /// Subscribers connect to this listener.
    Bind(PeerListener),
    /// The publisher connects to a collector.
    Connect(PeerAddress),
}

/// Socket on which batches are published. It never blocks on a subscriber.
pub(super) struct PubSocket {
    topic: Vec<u8>,
    peers: PeerTable<SubscriberState>,
    connector: Option<CollectorConnector>,
    ring: MessageRing,
    counters: Arc<PublisherCounters>,
}

impl PubSocket {
    /// Creates the socket. A byte is written to `wake`, which wakes the publisher thread, when a connection
    /// to a collector was made.
    ///
    /// Errors: no thread is available for the connection to a collector.
    pub(super) fn new(
        config: &KvEventsConfig,
        mode: PubSocketMode,
        topic: &str,
        wake: &UnixStream,
        counters: Arc<PublisherCounters>,
    ) -> io::Result<Self> {
        let (listener, connector) = match mode {
            PubSocketMode::Bind(listener) => (Some(listener), None),
            PubSocketMode::Connect(address) => {
                (None, Some(CollectorConnector::start(address, wake.try_clone()?)?))
            }
        };
        let body_bytes = topic.len() + BODY_BYTES;
        let peers = PeerTable::new(ZmtpSocketType::Publish, listener, SUBSCRIBERS_MAX, body_bytes);
        // A high-water mark of 0 means a limit by bytes only, as in ZeroMQ.
        let len_max = usize::try_from(config.hwm).ok().filter(|&len| len > 0);
        let ring = MessageRing::new(len_max.unwrap_or(usize::MAX), config.max_queue_bytes);
        Ok(Self { topic: topic.as_bytes().to_vec(), peers, connector, ring, counters })
    }

    /// Queues a batch in the ring; `poll` sends it to the subscribers.
    pub(super) fn send(&mut self, seq: u64, payload: Arc<[u8]>, now: Instant) {
        if self.peers.iter().all(|peer| peer.state.prefixes.is_empty()) {
            return;
        }
        let mut head = Vec::with_capacity(self.topic.len() + 32);
        put_frame(true, &self.topic, &mut head);
        put_frame(true, &seq.to_be_bytes(), &mut head);
        frame_header(false, payload.len(), &mut head);
        let message = OutgoingMessage { head, payload };
        if self.ring.would_evict(message.len()) {
            // Send pending messages before the eviction, so that subscribers that keep up miss no message of
            // a burst.
            self.poll(now);
        }
        self.ring.push(message);
    }

    /// Processes subscriptions and sends pending messages; returns whether more messages can be sent at once.
    pub(super) fn poll(&mut self, now: Instant) -> bool {
        self.peers.accept(now, &self.counters);
        if self.peers.len() == 0
            && let Some(stream) = self.connector.as_mut().and_then(CollectorConnector::next)
        {
            self.peers.add(stream, now, &self.counters);
        }
        let (ring, topic, counters) = (&self.ring, &self.topic, &self.counters);
        let (mut more, had_peers) = (false, self.peers.len() > 0);
        self.peers.serve(counters, |peer| {
            let (connection, state) = (&mut peer.connection, &mut peer.state);
            while let Some(head) = connection.next_frame(now)? {
                let ignored = state.take(head, connection.body(), topic, ring.end());
                count(&counters.ignored_subscriptions, u64::from(ignored));
            }
            let is_subscribed = !state.prefixes.is_empty();
            let next = || if is_subscribed { ring.take(&mut state.position) } else { None };
            more |= connection.transmit(BYTES_PER_TURN, next)? == TransmitResult::Budget;
            check_detached(connection)
        });
        let subscribed = self.peers.iter().filter(|peer| !peer.state.prefixes.is_empty());
        // Keep a message in the ring while it is being sent. A message that only a connection owns is then
        // always an evicted message, as `check_detached` requires.
        let needed = subscribed
            .map(|peer| peer.state.position - u64::from(peer.connection.sending().is_some()));
        self.ring.discard_before(needed.min().unwrap_or(u64::MAX));
        self.counters.subscribers.store(self.peers.len() as u64, Ordering::Relaxed);
        // If the collector has closed its connection, reconnect at once, not with the next batch.
        more | (self.connector.is_some() && had_peers && self.peers.len() == 0)
    }

    /// Adds the file descriptors of the socket to `polled`. Returns whether the publisher thread must also
    /// wake periodically, because a peer has a deadline or is throttled.
    pub(super) fn add_poll_fds<'a>(&'a self, polled: &mut Vec<PollFd<'a>>) -> bool {
        self.peers.add_poll_fds(polled)
    }

    /// Sends the remaining messages to the subscribers, for at most `limit`.
    pub(super) fn flush(&mut self, limit: Duration) {
        let start = Instant::now();
        loop {
            let now = Instant::now();
            self.poll(now);
            let mut peers = self.peers.iter().filter(|peer| !peer.state.prefixes.is_empty());
            let is_done = peers.all(|peer| {
                peer.state.position >= self.ring.end() && peer.connection.sending().is_none()
            });
            if is_done || now.duration_since(start) >= limit {
                return;
            }
            std::thread::sleep(FLUSH_POLL);
        }
    }
}

/// Returns an error if a large message, which was evicted from the ring, is kept only for this slow
/// subscriber.
fn check_detached(connection: &ZmtpConnection) -> Result<(), PeerError> {
    let is_detached = connection.sending().is_some_and(|message| {
        message.len() > DETACHED_BYTES_MAX && Arc::strong_count(message) == 1
    });
    if is_detached { Err(PeerError::HoldsLargeMessage(DETACHED_BYTES_MAX)) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOPIC: &[u8] = b"kv@pod@m";

    fn message(has_more: bool) -> ZmtpFrameHead {
        ZmtpFrameHead { is_command: false, has_more, is_body_complete: true }
    }

    #[test]
    fn only_matching_subscriptions_are_stored() {
        let mut subscriber = SubscriberState::default();
        let mut take = |body: &[u8]| subscriber.take(message(false), body, TOPIC, 7);
        assert!(!take(b"\x01kv@"));
        assert!(!take(b"\x01"));
        for number in 0..1_000_u32 {
            assert!(take(&[b"\x01other", &number.to_be_bytes()[..]].concat()));
        }
        assert!(take(b"\x01kv@pod@m and more"));
        assert!(!take(b"\x00kv@"));
        assert!(take(b"\x00elsewhere"));
        assert_eq!((subscriber.prefixes, subscriber.position), ([0].into(), 7));
    }

    #[test]
    fn commands_subscribe_and_cancel() {
        let command = ZmtpFrameHead { is_command: true, has_more: false, is_body_complete: true };
        let mut subscriber = SubscriberState::default();
        assert!(!subscriber.take(command, b"\x09SUBSCRIBEkv@", TOPIC, 0));
        assert!(!subscriber.is_idle());
        assert!(!subscriber.take(command, b"\x06CANCELkv@", TOPIC, 0));
        assert!(subscriber.is_idle());
    }

    #[test]
    fn later_frames_of_a_message_subscribe_to_nothing() {
        let mut subscriber = SubscriberState::default();
        subscriber.take(message(true), b"user", TOPIC, 0);
        subscriber.take(message(true), b"\x01", TOPIC, 0);
        subscriber.take(message(false), b"\x01", TOPIC, 0);
        assert!(subscriber.is_idle());
        subscriber.take(message(false), b"\x01", TOPIC, 0);
        assert!(!subscriber.is_idle());
    }
}
