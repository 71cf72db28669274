//! The socket under hyper: it fails when the client takes nothing for too long, and tells hyper's own refusals
//! as all others are told.

use super::bare_reply::{self, BareReply, begins_messages};
use super::connection::Progress;
use bytes::{Buf, Bytes};
use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep_until};

/// Bytes taken from a client behind a head that was refused.
const DRAINED_MAX: usize = 4 << 20;

/// A client's socket.
pub(super) struct TimedIo {
    stream: TcpStream,
    progress: Arc<Progress>,
    limit: Duration,
    /// Runs while a write is stuck.
    stall: Option<Pin<Box<Sleep>>>,
    /// Whether the newest head is one of the Messages API, as far as its first bytes tell.
    of_messages: bool,
    /// What hyper refused a head with, as far as it is not written yet.
    refusal: Bytes,
    /// Bytes that may still be taken and thrown away, once a head was refused.
    drained_max: usize,
}

impl TimedIo {
    /// `limit`: longest time without a byte taken by the client.
    pub(super) fn new(stream: TcpStream, progress: Arc<Progress>, limit: Duration) -> Self {
        let (stall, of_messages, refusal, drained_max) = (None, false, Bytes::new(), 0);
        Self { stream, progress, limit, stall, of_messages, refusal, drained_max }
    }

    /// Passes a write's outcome on, or fails it if it has been stuck too long.
    fn watch(
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
        self.watch(cx, outcome)
    }

    /// Writes the refusal; the `bare` bytes it stands for are written once all of it is.
    fn refuse(&mut self, cx: &mut Context<'_>, bare: usize) -> Poll<io::Result<usize>> {
        while !self.refusal.is_empty() {
            let rest = self.refusal.clone();
            let count = ready!(self.write(cx, &rest))?;
            if count == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.refusal.advance(count);
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

impl AsyncRead for TimedIo {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let outcome = Pin::new(&mut self.stream).poll_read(cx, buffer);
        let head = &buffer.filled()[before..];
        if !head.is_empty() && self.progress.received() {
            self.of_messages = begins_messages(head);
        }
        outcome
    }
}

impl AsyncWrite for TimedIo {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.refusal.is_empty() {
            match bare_reply::find(bytes) {
                None => return self.write(cx, bytes),
                // The end of the reply before it goes first.
                Some(BareReply { from, .. }) if from > 0 => return self.write(cx, &bytes[..from]),
                Some(bare) => {
                    (self.refusal, self.drained_max) = (bare.told(self.of_messages), DRAINED_MAX);
                    self.progress.refused(&bare.error);
                }
            }
        }
        self.refuse(cx, bytes.len())
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        self.watch(cx, outcome)
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
