//! A link over a byte stream: frames, one after the other.
//!
//! The two halves share nothing but the stream, so each may live on a thread of its own. Its end is the
//! end of the peer; a broken frame is an error, because no frame after it can be found.

use super::{Halves, LinkError, Receiving, Sending};
use crate::Epoch;
use crate::codec::Message;
use crate::frame::{self, BODY_BYTES_MAX, FrameError, HEADER_BYTES, Header};
use std::io::{ErrorKind, Read, Write};
use std::marker::PhantomData;
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Room for what is read at a time; a body grows by as much, so a length that lies allocates nothing.
const READ_BYTES: usize = 64 << 10;
/// Buffers larger than this are given back once their message is handed out or sent.
const KEEP_BYTES: usize = 4 << 20;

/// A stream whose reads can be bounded in time.
pub trait Timed: Read {
    /// Reads return `WouldBlock` or `TimedOut` after so long.
    fn set_timeout(&mut self, timeout: Duration) -> std::io::Result<()>;
}

impl Timed for UnixStream {
    fn set_timeout(&mut self, timeout: Duration) -> std::io::Result<()> {
        self.set_read_timeout(Some(timeout.max(Duration::from_micros(1))))
    }
}

impl Timed for TcpStream {
    fn set_timeout(&mut self, timeout: Duration) -> std::io::Result<()> {
        self.set_read_timeout(Some(timeout.max(Duration::from_micros(1))))
    }
}

/// Both directions of a Unix socket.
pub type UnixLink<O, I> = Halves<FrameWriter<UnixStream, O>, FrameReader<UnixStream, I>>;

/// One end of a Unix socket as a link of group generation `epoch`.
///
/// Errors: the system has no descriptor left.
pub fn unix<O, I>(stream: UnixStream, epoch: Epoch) -> std::io::Result<UnixLink<O, I>> {
    let other = stream.try_clone()?;
    Ok(Halves { sender: FrameWriter::new(stream, epoch), receiver: FrameReader::new(other, epoch) })
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
    pub fn retyped<N>(self) -> FrameWriter<W, N> {
        FrameWriter {
            messages: PhantomData,
            frame: self.frame,
            stream: self.stream,
            epoch: self.epoch,
        }
    }
}

impl<W: Write, M: Message> Sending for FrameWriter<W, M> {
    type Message = M;

    fn send(&mut self, message: M) -> Result<(), LinkError> {
        self.frame.clear();
        frame::encode(&message, self.epoch, &mut self.frame)?;
        let sent = self.stream.write_all(&self.frame).and_then(|()| self.stream.flush());
        if self.frame.capacity() > KEEP_BYTES {
            self.frame = Vec::new();
        }
        sent.map_err(|e| failure(e.kind()))
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
    stale: u64,
    body_bytes_max: usize,
    messages: PhantomData<fn() -> M>,
}

impl<R, M> FrameReader<R, M> {
    /// Receives messages of generation `epoch`; those of former ones are dropped and counted.
    pub fn new(stream: R, epoch: Epoch) -> Self {
        Self::limited(stream, epoch, BODY_BYTES_MAX)
    }

    /// The same for a peer that nobody knows yet: longer bodies are refused before they have arrived.
    pub fn limited(stream: R, epoch: Epoch, body_bytes_max: usize) -> Self {
        let messages = PhantomData;
        Self {
            stream,
            epoch,
            buffer: Vec::new(),
            start: 0,
            end: 0,
            timeout: None,
            stale: 0,
            body_bytes_max,
            messages,
        }
    }

    /// The same stream, with all that has arrived, for messages of another type from now on.
    pub fn retyped<N>(self) -> FrameReader<R, N> {
        let Self { stream, epoch, buffer, start, end, timeout, stale, body_bytes_max, .. } = self;
        let messages = PhantomData;
        FrameReader { stream, epoch, buffer, start, end, timeout, stale, body_bytes_max, messages }
    }

    /// The same stream, with another bound from now on.
    #[must_use]
    pub fn with_limit(self, body_bytes_max: usize) -> Self {
        Self { body_bytes_max, ..self }
    }

    /// Frames of former generations dropped so far.
    pub fn stale(&self) -> u64 {
        self.stale
    }

    /// Makes room for the rest of the frame in arrival, at most `READ_BYTES` at a time.
    fn make_room(&mut self) -> Result<(), FrameError> {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
            if self.buffer.len() > KEEP_BYTES {
                self.buffer = Vec::new();
            }
        } else if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let missing = match self.buffer[..self.end].first_chunk::<HEADER_BYTES>() {
            Some(header) => {
                let bytes = Header::parse(header, self.body_bytes_max)?.body_bytes;
                HEADER_BYTES + bytes - self.end
            }
            None => 0,
        };
        // Doubling keeps the copies of a long body few; half of what is held has arrived by then.
        let room = missing.min(self.end).max(READ_BYTES);
        if self.buffer.len() < self.end + room {
            self.buffer.resize(self.end + room, 0);
        }
        Ok(())
    }
}

impl<R: Read, M: Message> FrameReader<R, M> {
    /// The next message that has arrived whole.
    fn take(&mut self) -> Result<Option<M>, LinkError> {
        loop {
            let held = &self.buffer[self.start..self.end];
            let next = frame::decode_within::<M>(held, self.body_bytes_max)?;
            let Some((message, theirs, bytes)) = next else { return Ok(None) };
            let ours = self.epoch;
            self.start += bytes;
            match theirs.cmp(&ours) {
                std::cmp::Ordering::Equal => return Ok(Some(message)),
                std::cmp::Ordering::Less => self.stale += 1,
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
            if let Some(message) = self.take()? {
                return Ok(Some(message));
            }
            self.make_room()?;
            match self.stream.read(&mut self.buffer[self.end..]) {
                Ok(0) => return Err(LinkError::Closed),
                Ok(bytes) => self.end += bytes,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    return Ok(None);
                }
                Err(e) => return Err(failure(e.kind())),
            }
        }
    }
}

impl<R: Timed, M: Message> Receiving for FrameReader<R, M> {
    type Message = M;

    /// The time begins anew with every piece of a frame.
    fn recv(&mut self, timeout: Duration) -> Result<Option<M>, LinkError> {
        if self.timeout != Some(timeout) {
            self.stream.set_timeout(timeout).map_err(|e| failure(e.kind()))?;
            self.timeout = Some(timeout);
        }
        self.receive()
    }
}

/// A peer that is gone closes the stream in several ways.
fn failure(kind: ErrorKind) -> LinkError {
    match kind {
        ErrorKind::BrokenPipe
        | ErrorKind::ConnectionReset
        | ErrorKind::ConnectionAborted
        | ErrorKind::UnexpectedEof => LinkError::Closed,
        kind => LinkError::Io(kind),
    }
}
