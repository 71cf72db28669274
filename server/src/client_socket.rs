//! The socket under hyper: it fails when the client takes nothing for too long, tells hyper's own refusals as all
//! others are told, and keeps answering a client that has said all it has to say.
//!
//! A client that closes its sending half (`shutdown(SHUT_WR)`) and one that has left look alike: both send FIN. The
//! kernel of the second one answers bytes with RST. So after FIN a few bytes that clients skip are sent at once, and the
//! connection is looked at until the answer is complete.

use super::connection::{ConnectionProgress, EndOfInput};
use super::hyper_error_reply::{self, HyperErrorReply, is_anthropic_head};
use bytes::{Buf, Bytes};
use socket2::SockRef;
use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep_until};

/// What hyper sends to a client that waits with its body (`Expect: 100-continue`): no answer has begun with it.
const INTERIM: &[u8] = b"HTTP/1.1 100 ";
/// Length of such an answer alone; a longer write holds the final answer too.
const INTERIM_BYTES_MAX: usize = b"HTTP/1.1 100 Continue\r\n\r\n".len();
/// Bytes taken from a client behind a head that was refused.
const DRAINED_MAX: usize = 4 << 20;

/// Looks at a connection after FIN: soon, then less and less often.
const CHECK_INTERVAL_FIRST: Duration = Duration::from_millis(1);
const CHECK_INTERVAL_LAST: Duration = Duration::from_millis(50);
/// Time for the end of a request to be looked at before FIN counts as its end.
const REQUEST_TAIL_TIME: Duration = Duration::from_millis(50);

/// A client that has sent FIN.
struct HalfClosed {
    since: Instant,
    /// Until the next look.
    pause: Duration,
    timer: Pin<Box<Sleep>>,
    /// The request during which the client was probed.
    probed: Option<u64>,
    /// Looks since the last reply at which nothing was left to write; `None` during a reply.
    idle_checks: Option<u32>,
}

/// From FIN to the first probe: what is answered sooner needs none.
const PROBE_AFTER: Duration = Duration::from_millis(2);
/// hyper has had a turn to write between two looks.
const IDLE_CHECKS: u32 = 2;

impl HalfClosed {
    /// `limit`: how long the kernel sends bytes again to a client that does not confirm them.
    fn new(stream: &TcpStream, limit: Duration) -> Self {
        // Where no RST comes back because the way is cut, the kernel ends the connection.
        let _ = SockRef::from(stream).set_tcp_user_timeout(Some(limit));
        let since = Instant::now();
        let timer = Box::pin(sleep_until(since + CHECK_INTERVAL_FIRST));
        Self { since, pause: CHECK_INTERVAL_FIRST, timer, probed: None, idle_checks: None }
    }

    /// Begins again with short pauses.
    fn reset_checks(&mut self, cx: &mut Context<'_>) {
        self.pause = CHECK_INTERVAL_FIRST;
        self.timer.as_mut().reset(Instant::now() + self.pause);
        // A deadline of the future, which `cx` is woken at.
        let _ = self.timer.as_mut().poll(cx);
    }

    /// Looks that were due until now; `cx` is woken for the next one.
    fn due_checks(&mut self, cx: &mut Context<'_>) -> u32 {
        let mut looks = 0;
        while self.timer.as_mut().poll(cx).is_ready() {
            looks = 1;
            self.pause = (2 * self.pause).min(CHECK_INTERVAL_LAST);
            self.timer.as_mut().reset(Instant::now() + self.pause);
        }
        looks
    }
}

/// A client's socket.
pub(super) struct ClientSocket {
    stream: TcpStream,
    progress: Arc<ConnectionProgress>,
    limit: Duration,
    /// Runs while a write is stuck.
    stall: Option<Pin<Box<Sleep>>>,
    /// Whether the newest head is one of the Messages API, as far as its first bytes tell.
    is_anthropic: bool,
    /// What hyper refused a head with, as far as it is not written yet.
    rejection: Bytes,
    /// Bytes that may still be taken and thrown away, once a head was refused.
    drained_max: usize,
    /// Set once the client has sent FIN.
    half_closed: Option<HalfClosed>,
    /// The newest request of which something has been answered.
    last_responded: u64,
    /// Whether everything that hyper wanted to write is written: nothing of its own is cut in two.
    is_between_writes: bool,
}

impl ClientSocket {
    /// `limit`: longest time without a byte taken by the client.
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

    /// The client has sent FIN: whether it waits for an answer, has left, or has nothing to wait for.
    ///
    /// Ready: hyper sees the end of the input, or an error.
    fn end_of_input(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let (meaning, now) = (self.progress.classify_end_of_input(), Instant::now());
        if meaning == EndOfInput::NoRequest {
            return Poll::Ready(Ok(()));
        }
        let (stream, limit) = (&self.stream, self.limit);
        let half_closed = self.half_closed.get_or_insert_with(|| HalfClosed::new(stream, limit));
        let looks = half_closed.due_checks(cx);
        match meaning {
            EndOfInput::NoRequest => {}
            EndOfInput::AllAnswered => {
                let before = half_closed.idle_checks;
                if before.is_none() {
                    half_closed.reset_checks(cx);
                }
                let looks = before.unwrap_or(0) + if self.is_between_writes { looks } else { 0 };
                half_closed.idle_checks = Some(looks);
                if looks < IDLE_CHECKS {
                    return Poll::Pending;
                }
                return Poll::Ready(Ok(()));
            }
            EndOfInput::MaybeTruncated => {
                if now >= half_closed.since + REQUEST_TAIL_TIME {
                    return Poll::Ready(Ok(()));
                }
            }
            EndOfInput::RequestComplete => {
                half_closed.idle_checks = None;
                self.probe()?;
            }
        }
        match self.stream.take_error()? {
            Some(error) => Poll::Ready(Err(error)),
            None => Poll::Pending,
        }
    }

    /// Sends what only a client that has left answers with RST, once for each request.
    ///
    /// Errors: only a part of it could be sent, which spoils the answer.
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
            // Without room for it there is much that the client has not read: the next write finds out.
            Ok(_) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Passes a write's outcome on, or fails it if it has been stuck too long.
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

    /// Writes the refusal; the `bare` bytes it stands for are written once all of it is.
    fn write_rejection(&mut self, cx: &mut Context<'_>, bare: usize) -> Poll<io::Result<usize>> {
        while !self.rejection.is_empty() {
            let rest = self.rejection.clone();
            let count = ready!(self.write(cx, &rest))?;
            if count == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.rejection.advance(count);
        }
        Poll::Ready(Ok(bare))
    }

    /// Takes what the client is still sending: a socket closed with bytes unread takes the refusal back.
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
        let (before, room) = (buffer.filled().len(), buffer.remaining());
        ready!(Pin::new(&mut self.stream).poll_read(cx, buffer))?;
        let head = &buffer.filled()[before..];
        if head.is_empty() && room > 0 {
            return self.end_of_input(cx);
        }
        if self.progress.received() {
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
                // The end of the reply before it goes first.
                Some(HyperErrorReply { from, .. }) if from > 0 => {
                    return self.write(cx, &bytes[..from]);
                }
                Some(bare) => {
                    (self.rejection, self.drained_max) =
                        (bare.rewritten(self.is_anthropic), DRAINED_MAX);
                    self.progress.head_rejected(&bare.error);
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
        self.drain(cx)
    }
}
