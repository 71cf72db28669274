//! ZMTP connection: NULL handshake, heartbeats, incoming frames, outgoing messages; never blocks.

mod greeting;
mod outgoing_message;

use super::error::PeerError;
use super::frame::{ZmtpFrameHead, ZmtpFrameReader, put_command};
use super::stream::PeerStream;
pub(crate) use greeting::ZmtpSocketType;
use greeting::{GREETING, MECHANISM, VERSION_AT, socket_type};
pub(crate) use outgoing_message::OutgoingMessage;
use rustix::event::{PollFd, PollFlags};
use std::io::{self, ErrorKind, IoSlice};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Size of the input buffer, in bytes.
const INPUT_BYTES: usize = 2 << 10;
/// Maximum bytes that are read from a peer per `WINDOW`; further bytes stay in the socket buffer.
/// Subscriptions and replay requests are a few bytes each.
const INPUT_BYTES_PER_WINDOW: usize = 256 << 10;
const WINDOW: Duration = Duration::from_secs(1);
/// Maximum bytes of pending PONG commands. Further PINGs get no PONG until some pending commands are sent.
const CONTROL_BYTES_MAX: usize = 1 << 10;
/// Maximum time from the start of a connection to the end of its handshake.
const HANDSHAKE_TIME: Duration = Duration::from_secs(5);

/// Outcome of `ZmtpConnection::transmit`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TransmitResult {
    /// All pending commands and messages were sent.
    All,
    /// The peer's socket buffer is full.
    Blocked,
    /// More can be sent, but the byte budget of the call is used up.
    Budget,
}

/// Stage of the ZMTP handshake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ConnectionStage {
    Greeting,
    Ready,
    Open,
}

/// Connection to a peer. Uses a fixed amount of memory in addition to the message being sent.
#[derive(Debug)]
pub(crate) struct ZmtpConnection {
    stream: PeerStream,
    kind: ZmtpSocketType,
    stage: ConnectionStage,
    since: Instant,
    greeting: Vec<u8>,
    input: Box<[u8]>,
    /// Part of `input` that was read from the stream and not parsed yet.
    unread: std::ops::Range<usize>,
    reader: ZmtpFrameReader,
    /// Bytes of greeting, READY and PONG commands that have not been sent to the peer yet.
    control: Vec<u8>,
    sending: Option<PartialSend>,
    is_blocked: bool,
    sent_bytes: u64,
    window: Instant,
    window_bytes: usize,
}

/// Message that is being sent, and the number of its bytes sent so far.
#[derive(Debug)]
struct PartialSend {
    message: Arc<OutgoingMessage>,
    offset: usize,
}

impl ZmtpConnection {
    /// Creates a connection that keeps frame bodies of up to `body_bytes_max` bytes.
    pub(crate) fn new(
        stream: PeerStream,
        kind: ZmtpSocketType,
        body_bytes_max: usize,
        now: Instant,
    ) -> Self {
        Self {
            stream,
            kind,
            stage: ConnectionStage::Greeting,
            since: now,
            greeting: Vec::with_capacity(GREETING.len()),
            input: vec![0; INPUT_BYTES].into(),
            unread: 0..0,
            reader: ZmtpFrameReader::new(body_bytes_max),
            control: GREETING.to_vec(),
            sending: None,
            is_blocked: false,
            sent_bytes: 0,
            window: now,
            window_bytes: 0,
        }
    }

    /// Whether the handshake is complete.
    pub(crate) fn is_open(&self) -> bool {
        self.stage == ConnectionStage::Open
    }

    /// Number of bytes written to the peer so far.
    pub(crate) fn sent_bytes(&self) -> u64 {
        self.sent_bytes
    }

    /// Message of which a part has been sent; `None` = no message is being sent.
    pub(crate) fn sending(&self) -> Option<&Arc<OutgoingMessage>> {
        self.sending.as_ref().map(|sending| &sending.message)
    }

    /// Whether the connection needs a wake-up after some time even if the peer sends nothing: for the
    /// handshake timeout, or because its input is throttled.
    pub(crate) fn needs_time(&self) -> bool {
        !self.is_open() || self.is_throttled()
    }

    fn is_throttled(&self) -> bool {
        self.window_bytes >= INPUT_BYTES_PER_WINDOW
    }

    /// Returns the poll entry of the connection; `None` = no event of its file descriptor is awaited.
    pub(crate) fn poll_fd(&self, reads: bool) -> Option<PollFd<'_>> {
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::IN, reads && !self.is_throttled());
        flags.set(PollFlags::OUT, self.is_blocked || !self.control.is_empty());
        // Return no entry for empty flags, because `poll` would report a closed peer at every call.
        (!flags.is_empty()).then(|| PollFd::from_borrowed_fd(self.stream.as_fd(), flags))
    }

    /// Returns the next frame of a message, or the next command other than a heartbeat; `body` returns its
    /// body. `None` = no complete frame was received.
    ///
    /// Errors: the connection must be closed.
    pub(crate) fn next_frame(&mut self, now: Instant) -> Result<Option<ZmtpFrameHead>, PeerError> {
        if !self.is_open() && now.duration_since(self.since) > HANDSHAKE_TIME {
            return Err(PeerError::TimedOut { what: "no handshake", after: HANDSHAKE_TIME });
        }
        loop {
            if self.unread.is_empty() && !self.fill(now)? {
                return Ok(None);
            }
            if self.stage == ConnectionStage::Greeting {
                self.read_greeting()?;
                continue;
            }
            let mut rest = &self.input[self.unread.clone()];
            let head = self.reader.read(&mut rest)?;
            self.unread.start = self.unread.end - rest.len();
            let Some(head) = head else { continue };
            if self.stage == ConnectionStage::Ready {
                self.check_ready(head)?;
                self.stage = ConnectionStage::Open;
            } else if !(head.is_command && self.reply_to_heartbeat()) {
                return Ok(Some(head));
            }
        }
    }

    /// Returns the body of the frame that `next_frame` returned last.
    pub(crate) fn body(&self) -> &[u8] {
        self.reader.body()
    }

    /// Reads available bytes within the peer's rate limit; returns whether any were read.
    fn fill(&mut self, now: Instant) -> Result<bool, PeerError> {
        if now.duration_since(self.window) >= WINDOW {
            (self.window, self.window_bytes) = (now, 0);
        }
        if self.is_throttled() {
            return Ok(false);
        }
        match self.stream.read(&mut self.input) {
            Ok(0) => Err(PeerError::Closed),
            Ok(bytes) => {
                self.unread = 0..bytes;
                self.window_bytes += bytes;
                Ok(true)
            }
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                Ok(false)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Parses the greeting, or the part of it that was received.
    fn read_greeting(&mut self) -> Result<(), PeerError> {
        let received = self.unread.len().min(GREETING.len() - self.greeting.len());
        let part = self.unread.start..self.unread.start + received;
        self.greeting.extend_from_slice(&self.input[part]);
        self.unread.start += received;
        let has = |at: usize, is_valid: fn(u8) -> bool| {
            self.greeting.get(at).is_none_or(|&b| is_valid(b))
        };
        if !has(0, |byte| byte == 0xff) || !has(9, |byte| byte & 1 == 1) {
            return Err(PeerError::Handshake("not ZMTP, or older than version 2"));
        }
        if !has(VERSION_AT, |byte| byte >= 3) {
            return Err(PeerError::Handshake("ZMTP older than version 3"));
        }
        if self.greeting.len() == GREETING.len() {
            if self.greeting[MECHANISM] != GREETING[MECHANISM] {
                return Err(PeerError::Handshake("a security mechanism other than NULL"));
            }
            self.greeting = Vec::new();
            self.kind.ready(&mut self.control);
            self.stage = ConnectionStage::Ready;
        }
        Ok(())
    }

    fn check_ready(&self, head: ZmtpFrameHead) -> Result<(), PeerError> {
        let properties = self.body().strip_prefix(b"\x05READY");
        let Some(properties) = properties.filter(|_| head.is_command && head.is_body_complete)
        else {
            return Err(PeerError::Handshake("no READY command"));
        };
        match socket_type(properties) {
            Some(peer) if self.kind.accepts(peer) => Ok(()),
            Some(_) => Err(PeerError::Handshake("a socket of another type")),
            None => Err(PeerError::Handshake("READY without a socket type")),
        }
    }

    /// Responds to a PING with a PONG; returns whether the command was a PING or PONG.
    fn reply_to_heartbeat(&mut self) -> bool {
        let body = self.reader.body();
        if let Some(ping) = body.strip_prefix(b"\x04PING") {
            // After the command name, the first two bytes are the peer's TTL; the rest is the context, which
            // PONG returns.
            if let Some(context) = ping.get(2..)
                && self.control.len() + context.len() < CONTROL_BYTES_MAX
            {
                put_command(b"PONG", context, &mut self.control);
            }
            return true;
        }
        body.starts_with(b"\x04PONG")
    }

    /// Sends pending commands, then the messages that `next` returns, until the peer's buffer is full or
    /// about `budget` bytes were sent.
    ///
    /// Errors: the connection must be closed.
    pub(crate) fn transmit(
        &mut self,
        budget: usize,
        mut next: impl FnMut() -> Option<Arc<OutgoingMessage>>,
    ) -> Result<TransmitResult, PeerError> {
        let mut sent = 0;
        self.is_blocked = false;
        loop {
            let Some(written) = self.write_next(&mut next) else { return Ok(TransmitResult::All) };
            match written {
                Ok(0) => return Err(PeerError::Closed),
                Ok(bytes) => {
                    self.advance(bytes);
                    sent += bytes;
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    self.is_blocked = true;
                    return Ok(TransmitResult::Blocked);
                }
                Err(error) => return Err(error.into()),
            }
            if sent >= budget {
                return Ok(TransmitResult::Budget);
            }
        }
    }

    /// Writes the rest of the current message, else the pending commands, else the message that `next`
    /// returns, as far as the peer's buffer allows. `None` = nothing can be sent now.
    fn write_next(
        &mut self,
        next: impl FnOnce() -> Option<Arc<OutgoingMessage>>,
    ) -> Option<io::Result<usize>> {
        if self.sending.is_none() && !self.control.is_empty() {
            return Some(self.stream.write(&[IoSlice::new(&self.control)]));
        }
        if !self.is_open() {
            return None;
        }
        if self.sending.is_none() {
            self.sending = Some(PartialSend { message: next()?, offset: 0 });
        }
        let PartialSend { message, offset } = self.sending.as_ref()?;
        Some(self.stream.write(&message.from(*offset)))
    }

    /// Records that `bytes` bytes of the pending commands or of the current message were sent.
    fn advance(&mut self, bytes: usize) {
        self.sent_bytes += bytes as u64;
        match &mut self.sending {
            None => drop(self.control.drain(..bytes)),
            Some(sending) => {
                sending.offset += bytes;
                if sending.offset == sending.message.len() {
                    self.sending = None;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
