//! A stream socket of a link: Unix socket or TCP.

use super::TimeoutRead;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// One end of a connected stream socket.
#[derive(Debug)]
pub enum LinkSocket {
    /// Unix socket, to a process on the same host.
    Unix(UnixStream),
    /// TCP socket, to a process on any host.
    Tcp(TcpStream),
}

impl LinkSocket {
    /// Creates a socket from a descriptor; the socket family determines the variant.
    ///
    /// Errors: the descriptor is not a connected stream socket.
    pub fn from_fd(fd: OwnedFd) -> io::Result<Self> {
        let stream = TcpStream::from(fd);
        // Only a TCP socket has an address that parses as an Internet address.
        if stream.peer_addr().is_ok() {
            return Ok(Self::Tcp(stream));
        }
        let stream = UnixStream::from(OwnedFd::from(stream));
        stream.peer_addr()?; // Fails unless the descriptor is a connected socket.
        Ok(Self::Unix(stream))
    }

    /// Returns another handle of the socket, so that sender and receiver have one each.
    ///
    /// Errors: no file descriptor is left.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(match self {
            Self::Unix(stream) => Self::Unix(stream.try_clone()?),
            Self::Tcp(stream) => Self::Tcp(stream.try_clone()?),
        })
    }

    /// Shuts down both directions for every handle; received data can still be read.
    pub fn close(&self) {
        // An error means that the socket is closed already.
        let _ = match self {
            Self::Unix(stream) => stream.shutdown(Shutdown::Both),
            Self::Tcp(stream) => stream.shutdown(Shutdown::Both),
        };
    }
}

impl From<UnixStream> for LinkSocket {
    fn from(stream: UnixStream) -> Self {
        Self::Unix(stream)
    }
}

impl From<TcpStream> for LinkSocket {
    fn from(stream: TcpStream) -> Self {
        Self::Tcp(stream)
    }
}

impl From<LinkSocket> for OwnedFd {
    fn from(socket: LinkSocket) -> Self {
        match socket {
            LinkSocket::Unix(stream) => stream.into(),
            LinkSocket::Tcp(stream) => stream.into(),
        }
    }
}

impl AsFd for LinkSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(stream) => stream.as_fd(),
            Self::Tcp(stream) => stream.as_fd(),
        }
    }
}

impl Read for LinkSocket {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.read(buffer),
            Self::Tcp(stream) => stream.read(buffer),
        }
    }
}

impl Write for LinkSocket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.write(bytes),
            Self::Tcp(stream) => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(()) // Sockets are unbuffered.
    }
}

impl TimeoutRead for LinkSocket {
    fn set_timeout(&mut self, timeout: Duration) -> io::Result<()> {
        match self {
            Self::Unix(stream) => stream.set_timeout(timeout),
            Self::Tcp(stream) => stream.set_timeout(timeout),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::net::TcpListener;

    #[test]
    fn socket_kind_is_detected_from_descriptor() {
        let (unix, _other) = UnixStream::pair().unwrap();
        assert!(matches!(LinkSocket::from_fd(unix.into()), Ok(LinkSocket::Unix(_))));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let tcp = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert!(matches!(LinkSocket::from_fd(tcp.into()), Ok(LinkSocket::Tcp(_))));
        assert!(LinkSocket::from_fd(File::open("/dev/null").unwrap().into()).is_err());
        assert!(LinkSocket::from_fd(listener.into()).is_err(), "a listener has no peer");
    }

    #[test]
    fn closing_one_handle_closes_all_clones() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let local = LinkSocket::from(TcpStream::connect(listener.local_addr().unwrap()).unwrap());
        let mut remote = LinkSocket::from(listener.accept().unwrap().0);
        let mut other = local.try_clone().unwrap();
        other.write_all(b"last").unwrap();
        local.close();
        let mut read = Vec::new();
        remote.read_to_end(&mut read).unwrap();
        assert_eq!(read, b"last", "sent data is still delivered");
        assert!(other.write(b"more").is_err());
    }
}
