//! Stream whose reads and writes share one deadline, used for unauthenticated connections.

use protocol::link::TimeoutRead;
use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// Stream on which all reads and writes must finish by one deadline, regardless of how slowly bytes arrive.
pub(super) struct DeadlineStream<'a> {
    stream: &'a TcpStream,
    deadline: Instant,
}

impl<'a> DeadlineStream<'a> {
    /// Creates a stream with a deadline `time` from now. Reads and writes set timeouts on the underlying
    /// stream; these timeouts remain set until `clear_timeouts` is called.
    pub(super) fn new(stream: &'a TcpStream, time: Duration) -> Self {
        Self { stream, deadline: Instant::now() + time }
    }

    /// Returns a second handle with the same deadline, for the opposite direction.
    pub(super) fn opposite_direction(&self) -> Self {
        Self { stream: self.stream, deadline: self.deadline }
    }

    fn time_left(&self) -> io::Result<Duration> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
    }
}

/// Removes the read and write timeouts of a stream.
pub(super) fn clear_timeouts(stream: &TcpStream) -> io::Result<()> {
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(None)
}

impl Read for DeadlineStream<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(Some(self.time_left()?))?;
        self.stream.read(buffer)
    }
}

impl Write for DeadlineStream<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(Some(self.time_left()?))?;
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(()) // A socket has no user-space buffer.
    }
}

impl TimeoutRead for DeadlineStream<'_> {
    /// Ignores the timeout: the deadline takes precedence.
    fn set_timeout(&mut self, _timeout: Duration) -> io::Result<()> {
        Ok(())
    }
}
