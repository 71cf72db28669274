//! Stream of the server-sent events of one reply, with their arrival times.

use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::SendRequest;

use super::{ClientError, IdleConnections};

/// Maximum bytes of a server-sent event.
const SSE_EVENT_BYTES_MAX: usize = 16 << 20;

/// A server-sent event: one `data:` line.
#[derive(Debug)]
pub struct SseEvent<'a> {
    /// Arrival time of the last byte of the event.
    pub at: Instant,
    /// Content of the line without the prefix `data:`.
    pub data: &'a [u8],
}

/// Stream of the server-sent events of one reply. At the end of the reply, its connection becomes idle.
#[derive(Debug)]
pub struct SseEventStream<'a> {
    body: Incoming,
    connection: Option<SendRequest<Full<Bytes>>>,
    idle: &'a IdleConnections<SendRequest<Full<Bytes>>>,
    timeout: Duration,
    buffer: Vec<u8>,
    /// Number of bytes of `buffer` that have been consumed.
    read: usize,
    /// Number of bytes of `buffer` that have been searched: `buffer[read..searched]` contains no line end.
    searched: usize,
    arrived: Instant,
}

impl<'a> SseEventStream<'a> {
    pub(super) fn new(
        body: Incoming,
        connection: SendRequest<Full<Bytes>>,
        idle: &'a IdleConnections<SendRequest<Full<Bytes>>>,
        timeout: Duration,
    ) -> Self {
        Self {
            body,
            connection: Some(connection),
            idle,
            timeout,
            buffer: Vec::new(),
            read: 0,
            searched: 0,
            arrived: Instant::now(),
        }
    }

    /// Returns the next event; `None` after the end of the reply. SSE comment lines are skipped.
    pub async fn next(&mut self) -> Result<Option<SseEvent<'_>>, ClientError> {
        loop {
            while let Some((from, to)) = self.line() {
                let Some(data) = self.buffer[from..to].strip_prefix(b"data:") else { continue };
                let skipped = to - from - data.len() + usize::from(data.starts_with(b" "));
                return Ok(Some(SseEvent {
                    at: self.arrived,
                    data: &self.buffer[from + skipped..to],
                }));
            }
            if !self.fill().await? {
                return Ok(None);
            }
        }
    }

    /// Returns the byte range of the next complete line in the buffer, without its line end.
    fn line(&mut self) -> Option<(usize, usize)> {
        let end = self.buffer[self.searched..].iter().position(|&b| b == b'\n');
        let Some(end) = end.map(|at| self.searched + at) else {
            self.searched = self.buffer.len();
            return None;
        };
        let from = std::mem::replace(&mut self.read, end + 1);
        self.searched = self.read;
        let to = if self.buffer[from..end].ends_with(b"\r") { end - 1 } else { end };
        Some((from, to))
    }

    /// Reads more of the reply into the buffer. Returns false at the end of the reply.
    async fn fill(&mut self) -> Result<bool, ClientError> {
        self.buffer.drain(..self.read);
        self.searched -= self.read;
        self.read = 0;
        if self.buffer.len() > SSE_EVENT_BYTES_MAX {
            return Err(ClientError::Reply(format!(
                "an event exceeds {SSE_EVENT_BYTES_MAX} bytes"
            )));
        }
        let frame = tokio::time::timeout(self.timeout, self.body.frame()).await;
        match frame.map_err(|_| ClientError::Timeout(self.timeout))? {
            None => {
                if let Some(connection) = self.connection.take() {
                    self.idle.put(connection);
                }
                Ok(false)
            }
            Some(Err(error)) => Err(ClientError::Connection(error.to_string())),
            Some(Ok(frame)) => {
                self.arrived = Instant::now();
                if let Some(data) = frame.data_ref() {
                    self.buffer.extend_from_slice(data);
                }
                Ok(true)
            }
        }
    }
}
