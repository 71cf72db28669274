//! Client socket used by hyper. The socket fails writes that make no progress for too long, converts hyper's
//! own error replies to the JSON form of the API, and continues to serve clients that have closed their
//! sending half.
//!
//! Both a client that closes its sending half (`shutdown(SHUT_WR)`) and a client that has disconnected send
//! FIN. Only a disconnected client's kernel replies with RST to further data. So after FIN the server sends a
//! few bytes that clients ignore (a probe), and polls the socket for errors until the reply is complete.

mod half_closed_state;

use super::connection::{ConnectionProgress, RequestStateAtFin};
use super::hyper_error_reply::{self, HyperErrorReply, is_anthropic_head};
use bytes::{Buf, Bytes};
use half_closed_state::HalfClosedState;
use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep_until};

/// Start of the interim response that hyper sends for `Expect: 100-continue`. The interim response is not
/// part of the reply.
const INTERIM: &[u8] = b"HTTP/1.1 100 ";
/// Length of the interim response without other data; a longer write also contains the start of the reply.
const INTERIM_BYTES_MAX: usize = b"HTTP/1.1 100 Continue\r\n\r\n".len();
/// Maximum number of bytes that are read and discarded after a request head was rejected. After a reply to a request whose
/// body was not read, only the header timeout limits them.
const DRAINED_MAX: usize = 4 << 20;

/// Time after FIN during which the rest of a request is still read; then the request counts as truncated.
const REQUEST_TAIL_TIME: Duration = Duration::from_millis(50);
/// Delay from FIN until a probe is sent (bytes to which a disconnected client replies with RST). No probe is
/// sent if the reply is complete earlier.
const PROBE_AFTER: Duration = Duration::from_millis(2);

/// TCP socket of one client, through which hyper reads and writes.
pub(super) struct ClientSocket {
    stream: TcpStream,
    progress: Arc<ConnectionProgress>,
    limit: Duration,
    /// Timer of the write timeout; it exists while a write is blocked.
    stall: Option<Pin<Box<Sleep>>>,
    /// Whether the latest request head is for the Anthropic Messages API, determined from its first bytes.
    is_anthropic: bool,
    /// Unwritten bytes of the reply to a rejected request head.
    rejection: Bytes,
    /// Remaining number of bytes that may be read and discarded after the last reply.
    drained_max: usize,
    /// State of the connection after FIN; `None` while the client has not sent FIN.
    half_closed: Option<HalfClosedState>,
    /// Number of the latest request whose reply has been written at least in part.
    last_responded: u64,
    /// Whether all data that hyper has passed to this socket is written. Only then may a probe be sent
    /// (bytes to which a disconnected client replies with RST), because bytes inserted into a write would
    /// corrupt the reply.
    is_between_writes: bool,
}

impl ClientSocket {
    /// Creates the socket; `limit` is the write timeout: the maximum time that a write may make no progress.
    pub(super) fn new(
        stream: TcpStream,
        progress: Arc<ConnectionProgress>,
        limit: Duration,
    ) -> Self {
        Self {
            stream,
            progress,
            limit,
            stall: None,
            is_anthropic: false,
            rejection: Bytes::new(),
            drained_max: 0,
            half_closed: None,
            last_responded: 0,
            is_between_writes: true,
        }
    }

    /// Handles FIN: the client may wait for a reply, have disconnected, or need no further reply.
    ///
    /// Ready: the result is passed to hyper, as end of input or as an error.
    fn end_of_input(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let (end_of_input, now) = (self.progress.classify_end_of_input(), Instant::now());
        if end_of_input == RequestStateAtFin::NoRequest {
            return Poll::Ready(Ok(()));
        }
        let (stream, limit) = (&self.stream, self.limit);
        let half_closed =
            self.half_closed.get_or_insert_with(|| HalfClosedState::new(stream, limit));
        let checks = half_closed.due_checks(cx);
        match end_of_input {
            RequestStateAtFin::NoRequest => {}
            RequestStateAtFin::RepliesDone => {
                let checks = if self.is_between_writes { checks } else { 0 };
                return half_closed.poll_idle(cx, checks).map(Ok);
            }
            RequestStateAtFin::MaybeTruncated => {
                if now >= half_closed.since + REQUEST_TAIL_TIME {
                    return Poll::Ready(Ok(()));
                }
            }
            RequestStateAtFin::RequestComplete => {
                half_closed.idle_checks = None;
                self.probe()?;
            }
        }
        match self.stream.take_error()? {
            Some(error) => Poll::Ready(Err(error)),
            None => Poll::Pending,
        }
    }

    /// Sends a probe, at most once per request: a disconnected client replies to a probe with RST; a waiting
    /// client ignores it.
    ///
    /// Errors: the probe was sent only in part, which corrupts the reply.
    fn probe(&mut self) -> io::Result<()> {
        let request = self.progress.request();
        let Some(half_closed) = &mut self.half_closed else { return Ok(()) };
        let is_early = half_closed.since.elapsed() < PROBE_AFTER;
        if is_early || half_closed.probed == Some(request) || !self.is_between_writes {
            return Ok(());
        }
        half_closed.probed = Some(request);
        let Some(probe) = self.progress.half_close_probe(self.last_responded == request) else {
            return Ok(());
        };
        match self.stream.try_write(probe) {
            Ok(written) if written < probe.len() => Err(io::ErrorKind::WriteZero.into()),
            // A full send buffer means that the client has not read recent data; in this case, the next write
            // detects a disconnect.
            Ok(_) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Returns `outcome`, the result of a write attempt, or an error if writes have been blocked for the
    /// write timeout.
    fn fail_if_stalled(
        &mut self,
        cx: &mut Context<'_>,
        outcome: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        if outcome.is_ready() {
            self.stall = None;
            return outcome;
        }
        let limit = self.limit;
        let timer = self.stall.get_or_insert_with(|| Box::pin(sleep_until(Instant::now() + limit)));
        match timer.as_mut().poll(cx) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
        }
    }

    fn write(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write(cx, bytes);
        let is_interim = bytes.starts_with(INTERIM) && bytes.len() <= INTERIM_BYTES_MAX;
        if !is_interim {
            self.last_responded = self.progress.request();
        }
        self.is_between_writes =
            matches!(outcome, Poll::Ready(Ok(written)) if written == bytes.len());
        self.fail_if_stalled(cx, outcome)
    }

    /// Writes the reply that replaces hyper's own error reply. Once the reply is completely written, returns
    /// `hyper_reply_len`, the length of hyper's reply, as the number of written bytes.
    fn write_rejection(
        &mut self,
        cx: &mut Context<'_>,
        hyper_reply_len: usize,
    ) -> Poll<io::Result<usize>> {
        while !self.rejection.is_empty() {
            let rest = self.rejection.clone();
            let count = ready!(self.write(cx, &rest))?;
            if count == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.rejection.advance(count);
        }
        Poll::Ready(Ok(hyper_reply_len))
    }

    /// Reads and discards the rest of a request that was not read: closing a socket with unread data would send RST,
    /// which can make the client lose the reply.
    fn drain(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut scratch = [0; 4 << 10];
        while self.drained_max > 0 {
            let mut buffer = ReadBuf::new(&mut scratch);
            ready!(Pin::new(&mut self.stream).poll_read(cx, &mut buffer))?;
            match buffer.filled().len() {
                0 => break,
                count => self.drained_max = self.drained_max.saturating_sub(count),
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for ClientSocket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.half_closed.is_some() {
            return self.end_of_input(cx);
        }
        let (before, capacity) = (buffer.filled().len(), buffer.remaining());
        ready!(Pin::new(&mut self.stream).poll_read(cx, buffer))?;
        let head = &buffer.filled()[before..];
        if head.is_empty() && capacity > 0 {
            return self.end_of_input(cx);
        }
        if self.progress.on_bytes_received() {
            self.is_anthropic = is_anthropic_head(head);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for ClientSocket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.rejection.is_empty() {
            match hyper_error_reply::find(bytes) {
                None => return self.write(cx, bytes),
                // The bytes before hyper's error reply belong to the preceding reply and are written
                // unchanged.
                Some(HyperErrorReply { from, .. }) if from > 0 => {
                    return self.write(cx, &bytes[..from]);
                }
                Some(hyper_reply) => {
                    (self.rejection, self.drained_max) =
                        (hyper_reply.rewritten(self.is_anthropic), DRAINED_MAX);
                    self.progress.on_head_rejected(&hyper_reply.error);
                }
            }
        }
        self.write_rejection(cx, bytes.len())
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let all: usize = slices.iter().map(|slice| slice.len()).sum();
        let outcome = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        self.last_responded = self.progress.request();
        self.is_between_writes = matches!(outcome, Poll::Ready(Ok(written)) if written == all);
        self.fail_if_stalled(cx, outcome)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(Pin::new(&mut self.stream).poll_shutdown(cx))?;
        if self.progress.take_unread_body() {
            self.drained_max = usize::MAX;
        }
        self.drain(cx)
    }
}
