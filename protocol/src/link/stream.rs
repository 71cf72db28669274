//! A link over a byte stream: a sequence of frames.
//!
//! The two halves share only the stream, so each may be used on its own thread. The end of the stream means
//! that the peer has closed the link. A corrupt frame is an error, because later frames cannot be located.

use super::{LinkError, LinkHalves, MessageReceiver, MessageSender};
use crate::Epoch;
use crate::codec::WireMessage;
use crate::frame::{self, BODY_BYTES_MAX, DecodedFrame, FrameError, FrameHeader, HEADER_BYTES};
use std::io::{ErrorKind, Read, Write};
use std::marker::PhantomData;
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Minimum size of the buffer for one read in bytes. The buffer grows with the bytes received and not with
/// the length in a header, so a forged length allocates nothing.
const READ_CHUNK_BYTES: usize = 64 << 10;
/// Buffers larger than this are freed after their message was delivered or sent.
const RETAINED_BUFFER_BYTES: usize = 4 << 20;

/// A stream with a read timeout.
pub trait TimeoutRead: Read {
    /// Sets the time after which reads return `WouldBlock` or `TimedOut`.
    fn set_timeout(&mut self, timeout: Duration) -> std::io::Result<()>;
}

impl TimeoutRead for UnixStream {
    fn set_timeout(&mut self, timeout: Duration) -> std::io::Result<()> {
        self.set_read_timeout(Some(timeout.max(Duration::from_micros(1))))
    }
}

impl TimeoutRead for TcpStream {
    fn set_timeout(&mut self, timeout: Duration) -> std::io::Result<()> {
        self.set_read_timeout(Some(timeout.max(Duration::from_micros(1))))
    }
}

/// A link over a Unix socket.
pub type UnixLink<O, I> = LinkHalves<FrameWriter<UnixStream, O>, FrameReader<UnixStream, I>>;

/// Creates a link of epoch `epoch` over a Unix socket.
///
/// Errors: no file descriptor is left.
pub fn unix_link<O, I>(stream: UnixStream, epoch: Epoch) -> std::io::Result<UnixLink<O, I>> {
    let other = stream.try_clone()?;
    Ok(LinkHalves {
        sender: FrameWriter::new(stream, epoch),
        receiver: FrameReader::new(other, epoch),
    })
}

/// Sending half of a link: writes messages as frames to a byte stream.
#[derive(Debug)]
pub struct FrameWriter<W, M> {
    stream: W,
    epoch: Epoch,
    frame: Vec<u8>,
    messages: PhantomData<fn(M)>,
}

impl<W, M> FrameWriter<W, M> {
    /// Creates a writer of frames of epoch `epoch`.
    pub fn new(stream: W, epoch: Epoch) -> Self {
        Self { stream, epoch, frame: Vec::new(), messages: PhantomData }
    }

    /// Returns the stream, positioned after the last frame.
    pub fn into_stream(self) -> W {
        self.stream
    }

    /// Returns a writer on this stream for messages of another type, for example after a handshake.
    pub fn with_message_type<N>(self) -> FrameWriter<W, N> {
        FrameWriter {
            messages: PhantomData,
            frame: self.frame,
            stream: self.stream,
            epoch: self.epoch,
        }
    }
}

impl<W: Write, M: WireMessage> MessageSender for FrameWriter<W, M> {
    type Message = M;

    fn send(&mut self, message: M) -> Result<(), LinkError> {
        self.frame.clear();
        frame::encode(&message, self.epoch, &mut self.frame)?;
        let sent = self.stream.write_all(&self.frame).and_then(|()| self.stream.flush());
        if self.frame.capacity() > RETAINED_BUFFER_BYTES {
            self.frame = Vec::new();
        }
        sent.map_err(|e| link_error(e.kind()))
    }
}

/// Receiving half of a link: reads messages from the frames of a byte stream.
#[derive(Debug)]
pub struct FrameReader<R, M> {
    stream: R,
    epoch: Epoch,
    /// Buffer for received bytes; `start..end` are the bytes that were not decoded yet.
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    timeout: Option<Duration>,
    stale_frames: u64,
    body_bytes_max: usize,
    messages: PhantomData<fn() -> M>,
}

impl<R, M> FrameReader<R, M> {
    /// Creates a reader of epoch `epoch`; frames of older epochs are dropped and counted.
    pub fn new(stream: R, epoch: Epoch) -> Self {
        Self::with_body_limit(stream, epoch, BODY_BYTES_MAX)
    }

    /// Creates a reader for an unauthenticated peer: bodies longer than `body_bytes_max` are rejected before
    /// they are received.
    pub fn with_body_limit(stream: R, epoch: Epoch, body_bytes_max: usize) -> Self {
        let messages = PhantomData;
        Self {
            stream,
            epoch,
            buffer: Vec::new(),
            start: 0,
            end: 0,
            timeout: None,
            stale_frames: 0,
            body_bytes_max,
            messages,
        }
    }

    /// Returns a reader on this stream, with all buffered bytes, for messages of another type, for example
    /// after a handshake.
    pub fn with_message_type<N>(self) -> FrameReader<R, N> {
        let Self {
            stream, epoch, buffer, start, end, timeout, stale_frames, body_bytes_max, ..
        } = self;
        let messages = PhantomData;
        FrameReader {
            stream,
            epoch,
            buffer,
            start,
            end,
            timeout,
            stale_frames,
            body_bytes_max,
            messages,
        }
    }

    /// Returns the reader with another limit on body length.
    #[must_use]
    pub fn set_body_limit(self, body_bytes_max: usize) -> Self {
        Self { body_bytes_max, ..self }
    }

    /// Returns the number of dropped frames of older epochs.
    pub fn stale_frames(&self) -> u64 {
        self.stale_frames
    }

    /// Extends the buffer for the rest of the current frame, by at most the number of bytes in the buffer or
    /// `READ_CHUNK_BYTES`, whichever is larger.
    fn reserve_read_space(&mut self) -> Result<(), FrameError> {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
            if self.buffer.len() > RETAINED_BUFFER_BYTES {
                self.buffer = Vec::new();
            }
        } else if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let missing = match self.buffer[..self.end].first_chunk::<HEADER_BYTES>() {
            Some(header) => {
                let bytes = FrameHeader::parse(header, self.body_bytes_max)?.body_bytes;
                HEADER_BYTES + bytes - self.end
            }
            None => 0,
        };
        // Doubling bounds the number of copies of a long body. At least half of the extended buffer is filled
        // with received bytes.
        let read_bytes = missing.min(self.end).max(READ_CHUNK_BYTES);
        if self.buffer.len() < self.end + read_bytes {
            self.buffer.resize(self.end + read_bytes, 0);
        }
        Ok(())
    }
}

impl<R: Read, M: WireMessage> FrameReader<R, M> {
    /// Returns the next complete message in the buffer.
    fn next_buffered_message(&mut self) -> Result<Option<M>, LinkError> {
        loop {
            let buffered = &self.buffer[self.start..self.end];
            let next = frame::decode_with_limit::<M>(buffered, self.body_bytes_max)?;
            let Some(DecodedFrame { message, epoch: theirs, frame_bytes }) = next else {
                return Ok(None);
            };
            let ours = self.epoch;
            self.start += frame_bytes;
            match theirs.cmp(&ours) {
                std::cmp::Ordering::Equal => return Ok(Some(message)),
                std::cmp::Ordering::Less => self.stale_frames += 1,
                std::cmp::Ordering::Greater => {
                    return Err(FrameError::Epoch { theirs, ours }.into());
                }
            }
        }
    }

    /// Waits for a message until a read of the stream times out; `None` = timeout.
    ///
    /// Errors: `LinkError::Closed` at the end of the stream, even within a frame; a corrupt frame.
    pub fn receive(&mut self) -> Result<Option<M>, LinkError> {
        loop {
            if let Some(message) = self.next_buffered_message()? {
                return Ok(Some(message));
            }
            self.reserve_read_space()?;
            match self.stream.read(&mut self.buffer[self.end..]) {
                Ok(0) => return Err(LinkError::Closed),
                Ok(bytes) => self.end += bytes,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    return Ok(None);
                }
                Err(e) => return Err(link_error(e.kind())),
            }
        }
    }
}

impl<R: TimeoutRead, M: WireMessage> MessageReceiver for FrameReader<R, M> {
    type Message = M;

    /// Waits for a message as `MessageLink::recv`. The timeout restarts with every received part of a frame.
    fn recv(&mut self, timeout: Duration) -> Result<Option<M>, LinkError> {
        if self.timeout != Some(timeout) {
            self.stream.set_timeout(timeout).map_err(|e| link_error(e.kind()))?;
            self.timeout = Some(timeout);
        }
        self.receive()
    }
}

/// Maps an I/O error: several error kinds mean that the peer has closed the link.
fn link_error(kind: ErrorKind) -> LinkError {
    match kind {
        ErrorKind::BrokenPipe
        | ErrorKind::ConnectionReset
        | ErrorKind::ConnectionAborted
        | ErrorKind::UnexpectedEof => LinkError::Closed,
        kind => LinkError::Io(kind),
    }
}
