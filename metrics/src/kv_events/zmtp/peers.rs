//! Peers of a socket: they are accepted up to a limit, served one after the other, and removed when their
//! connections end.

use super::connection::{ZmtpConnection, ZmtpSocketType};
use super::error::PeerError;
use super::stream::{PeerListener, PeerStream};
use crate::LogRateLimiter;
use crate::kv_events::publisher_counters::{PublisherCounters, count};
use rustix::event::{PollFd, PollFlags};
use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// Maximum number of connections accepted before data of the connected peers is processed.
const ACCEPTED_PER_TURN: usize = 64;
/// Pause after `accept` has failed, for example because no file descriptor is available.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Connected peer: its connection and the state that depends on the socket type.
#[derive(Debug)]
pub(crate) struct ZmtpPeer<S> {
    /// ZMTP connection to the peer.
    pub(crate) connection: ZmtpConnection,
    /// Subscriptions or requests of the peer.
    pub(crate) state: S,
}

/// Table of the peers that are connected to a socket.
#[derive(Debug)]
pub(crate) struct PeerTable<S> {
    kind: ZmtpSocketType,
    listener: Option<PeerListener>,
    peers: Vec<ZmtpPeer<S>>,
    peers_max: usize,
    body_bytes_max: usize,
    /// Time until which no connection is accepted, because `accept` has failed.
    accepts_from: Option<Instant>,
    log_limiter: LogRateLimiter,
}

/// State of a peer that depends on the socket type: its subscriptions or its replay request.
pub(crate) trait PeerState: Default {
    /// Whether the peer has no subscription or request, so that a new peer may replace it.
    fn is_idle(&self) -> bool;
    /// Whether frames of the peer are read at present. False while a replay request of the peer is
    /// unfinished.
    fn reads(&self) -> bool;
}

impl<S: PeerState> PeerTable<S> {
    /// Creates a table for at most `peers_max` peers; frame bodies are kept up to `body_bytes_max` bytes.
    pub(crate) fn new(
        kind: ZmtpSocketType,
        listener: Option<PeerListener>,
        peers_max: usize,
        body_bytes_max: usize,
    ) -> Self {
        let (peers, accepts_from, log_limiter) = (Vec::new(), None, LogRateLimiter::default());
        Self { kind, listener, peers, peers_max, body_bytes_max, accepts_from, log_limiter }
    }

    /// Iterates over the peers, in the order in which they connected.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &ZmtpPeer<S>> {
        self.peers.iter()
    }

    /// Number of peers.
    pub(crate) fn len(&self) -> usize {
        self.peers.len()
    }

    /// Accepts pending connections to the listener, if the socket has one.
    pub(crate) fn accept(&mut self, now: Instant, counters: &PublisherCounters) {
        if self.accepts_from.is_some_and(|from| now < from) {
            return;
        }
        self.accepts_from = None;
        for _ in 0..ACCEPTED_PER_TURN {
            let Some(listener) = &self.listener else { return };
            match listener.accept() {
                Ok(stream) => self.add(stream, now, counters),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) => {
                    self.accepts_from = Some(now + ACCEPT_PAUSE);
                    if let Some(unlogged) = self.log_limiter.allow(now) {
                        tracing::warn!(%error, unlogged, "KV events: accept failed");
                    }
                    return;
                }
            }
        }
    }

    /// Adds a peer. If the table is full, the oldest idle peer is removed; without an idle peer, the new
    /// connection is closed.
    pub(crate) fn add(&mut self, stream: PeerStream, now: Instant, counters: &PublisherCounters) {
        if self.peers.len() == self.peers_max {
            count(&counters.rejected_peers, 1);
            let (limit, socket) = (self.peers_max, self.kind.name());
            if let Some(unlogged) = self.log_limiter.allow(now) {
                tracing::warn!(limit, socket, unlogged, "KV events: too many connections");
            }
            let Some(idle) = self.peers.iter().position(|peer| peer.state.is_idle()) else {
                return;
            };
            self.peers.remove(idle);
        }
        let connection = ZmtpConnection::new(stream, self.kind, self.body_bytes_max, now);
        self.peers.push(ZmtpPeer { connection, state: S::default() });
    }

    /// Calls `serve` for each peer and removes the peers for which it returns an error.
    pub(crate) fn serve(
        &mut self,
        counters: &PublisherCounters,
        mut serve: impl FnMut(&mut ZmtpPeer<S>) -> Result<(), PeerError>,
    ) {
        self.peers.retain_mut(|peer| {
            let Err(error) = serve(peer) else { return true };
            tracing::debug!(%error, "KV events: a connection ends");
            count(&counters.rejected_peers, u64::from(error.is_fault_of_peer()));
            false
        });
    }

    /// Adds the file descriptors of the socket to `polled`. Returns whether the publisher thread must also
    /// wake periodically: a handshake is pending, a peer is throttled, or `accept` is paused.
    pub(crate) fn add_poll_fds<'a>(&'a self, polled: &mut Vec<PollFd<'a>>) -> bool {
        if let Some(listener) = self.listener.as_ref().filter(|_| self.accepts_from.is_none()) {
            polled.push(PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN));
        }
        let mut needs_time = self.accepts_from.is_some();
        for ZmtpPeer { connection, state } in &self.peers {
            polled.extend(connection.poll_fd(state.reads()));
            needs_time |= connection.needs_time();
        }
        needs_time
    }
}
