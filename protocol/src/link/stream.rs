//! A link over a byte stream: frames, one after the other.
//!
//! The two halves share nothing but the stream, so each may live on a thread of its own. Its end is the
//! end of the peer; a broken frame is an error, because no frame after it can be found.

use super::{LinkError, LinkHalves, MessageReceiver, MessageSender};
use crate::Epoch;
use crate::codec::WireMessage;
use crate::frame::{self, BODY_BYTES_MAX, FrameError, FrameHeader, HEADER_BYTES};
use std::io::{ErrorKind, Read, Write};
use std::marker::PhantomData;
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Room for what is read at a time; a body grows by as much, so a length that lies allocates nothing.
const READ_CHUNK_BYTES: usize = 64 << 10;
/// Buffers larger than this are given back once their message is handed out or sent.
const RETAINED_BUFFER_BYTES: usize = 4 << 20;

/// A stream whose reads can be bounded in time.
pub trait TimeoutRead: Read {
    /// Reads return `WouldBlock` or `TimedOut` after so long.
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

/// Both directions of a Unix socket.
pub type UnixLink<O, I> = LinkHalves<FrameWriter<UnixStream, O>, FrameReader<UnixStream, I>>;

/// One end of a Unix socket as a link of group generation `epoch`.
///
/// Errors: the system has no descriptor left.
pub fn unix_link<O, I>(stream: UnixStream, epoch: Epoch) -> std::io::Result<UnixLink<O, I>> {
    let other = stream.try_clone()?;
    Ok(LinkHalves {
        sender: FrameWriter::new(stream, epoch),
        receiver: FrameReader::new(other, epoch),
    })
}

/// The half that sends.
#[derive(Debug)]
pub struct FrameWriter<W, M> {
    stream: W,
    epoch: Epoch,
    frame: Vec<u8>,
    messages: PhantomData<fn(M)>,
}

impl<W, M> FrameWriter<W, M> {
    /// Sends messages as frames of generation `epoch`.
    pub fn new(stream: W, epoch: Epoch) -> Self {
        Self { stream, epoch, frame: Vec::new(), messages: PhantomData }
    }

    /// The stream itself, behind the last frame.
    pub fn into_stream(self) -> W {
        self.stream
    }

    /// The same stream, for messages of another type from now on.
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

/// The half that receives.
#[derive(Debug)]
pub struct FrameReader<R, M> {
    stream: R,
    epoch: Epoch,
    /// Bytes that have arrived lie in `start..end`.
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    timeout: Option<Duration>,
    stale_frames: u64,
    body_bytes_max: usize,
    messages: PhantomData<fn() -> M>,
}

impl<R, M> FrameReader<R, M> {
    /// Receives messages of generation `epoch`; those of former ones are dropped and counted.
    pub fn new(stream: R, epoch: Epoch) -> Self {
        Self::with_body_limit(stream, epoch, BODY_BYTES_MAX)
    }

    /// The same for a peer that nobody knows yet: longer bodies are refused before they have arrived.
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

    /// The same stream, with all that has arrived, for messages of another type from now on.
    pub fn with_message_type<N>(self) -> FrameReader<R, N> {
        let Self {
            stream,
            epoch,
            buffer,
            start,
            end,
            timeout,
            stale_frames: stale,
            body_bytes_max,
            ..
        } = self;
        let messages = PhantomData;
        FrameReader {
            stream,
            epoch,
            buffer,
            start,
            end,
            timeout,
            stale_frames: stale,
            body_bytes_max,
            messages,
        }
    }

    /// The same stream, with another bound from now on.
    #[must_use]
    pub fn set_body_limit(self, body_bytes_max: usize) -> Self {
        Self { body_bytes_max, ..self }
    }

    /// Frames of former generations dropped so far.
    pub fn stale_frames(&self) -> u64 {
        self.stale_frames
    }

    /// Makes room for the rest of the frame in arrival, at most `READ_CHUNK_BYTES` at a time.
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
        // Doubling keeps the copies of a long body few; half of what is held has arrived by then.
        let room = missing.min(self.end).max(READ_CHUNK_BYTES);
        if self.buffer.len() < self.end + room {
            self.buffer.resize(self.end + room, 0);
        }
        Ok(())
    }
}

impl<R: Read, M: WireMessage> FrameReader<R, M> {
    /// The next message that has arrived whole.
    fn next_buffered_message(&mut self) -> Result<Option<M>, LinkError> {
        loop {
            let held = &self.buffer[self.start..self.end];
            let next = frame::decode_with_limit::<M>(held, self.body_bytes_max)?;
            let Some((message, theirs, bytes)) = next else { return Ok(None) };
            let ours = self.epoch;
            self.start += bytes;
            match theirs.cmp(&ours) {
                std::cmp::Ordering::Equal => return Ok(Some(message)),
                std::cmp::Ordering::Less => self.stale_frames += 1,
                std::cmp::Ordering::Greater => {
                    return Err(FrameError::Epoch { theirs, ours }.into());
                }
            }
        }
    }

    /// Waits for a message for as long as the stream's own reads wait; `None` = they gave up.
    ///
    /// Errors: `LinkError::Closed` at the end of the stream, also within a frame; a broken frame.
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

    /// The time begins anew with every piece of a frame.
    fn recv(&mut self, timeout: Duration) -> Result<Option<M>, LinkError> {
        if self.timeout != Some(timeout) {
            self.stream.set_timeout(timeout).map_err(|e| link_error(e.kind()))?;
            self.timeout = Some(timeout);
        }
        self.receive()
    }
}

/// A peer that is gone closes the stream in several ways.
fn link_error(kind: ErrorKind) -> LinkError {
    match kind {
        ErrorKind::BrokenPipe
        | ErrorKind::ConnectionReset
        | ErrorKind::ConnectionAborted
        | ErrorKind::UnexpectedEof => LinkError::Closed,
        kind => LinkError::Io(kind),
    }
}
