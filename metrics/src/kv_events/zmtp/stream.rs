//! Addresses, listeners and streams of `tcp://` and `ipc://` endpoints.

use socket2::{SockRef, TcpKeepalive};
use std::io::{self, IoSlice, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// TCP keep-alive settings, with which a peer that has vanished is detected after about two minutes.
const KEEPALIVE_IDLE: Duration = Duration::from_mins(1);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(15);
const KEEPALIVE_PROBES: u32 = 4;
/// Connect timeout for each address of a host.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Address of a socket, parsed from an endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PeerAddress {
    /// `tcp://HOST:PORT`; host `*` is any IPv4 address of this machine.
    Tcp {
        /// Host name or address, without brackets.
        host: String,
        /// Port; 0 = chosen by the operating system.
        port: u16,
    },
    /// `ipc://PATH`: Unix domain socket at a path.
    Path(PathBuf),
    /// `ipc://@NAME`: Unix domain socket with a name in Linux's abstract namespace.
    Abstract(String),
}

impl PeerAddress {
    /// Parses an endpoint that was checked before to have the form `SCHEME://ADDRESS`; `None` if the scheme
    /// is not supported.
    pub(crate) fn parse(endpoint: &str) -> Option<Self> {
        let (scheme, rest) = endpoint.split_once("://")?;
        match scheme {
            "tcp" => {
                let (host, port) = rest.rsplit_once(':')?;
                let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
                Some(Self::Tcp { host, port: port.parse().ok()? })
            }
            "ipc" => Some(match rest.strip_prefix('@') {
                Some(name) => Self::Abstract(name.to_owned()),
                None => Self::Path(rest.into()),
            }),
            _ => None,
        }
    }

    /// Resolves a host name; IPv4 addresses come first, as in libzmq.
    fn resolve(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
        if host == "*" {
            return Ok(vec![(Ipv4Addr::UNSPECIFIED, port).into()]);
        }
        let mut addresses: Vec<_> = (host, port).to_socket_addrs()?.collect();
        addresses.sort_by_key(SocketAddr::is_ipv6);
        Ok(addresses)
    }

    /// Connects to the address, with a timeout for each address of a host.
    ///
    /// Errors: no address accepts the connection.
    pub(crate) fn connect(&self) -> io::Result<PeerStream> {
        match self {
            Self::Tcp { host, port } => {
                let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
                for address in Self::resolve(host, *port)? {
                    match TcpStream::connect_timeout(&address, CONNECT_TIMEOUT) {
                        Ok(stream) => return PeerStream::tcp(stream),
                        Err(error) => last = error,
                    }
                }
                Err(last)
            }
            Self::Path(path) => PeerStream::unix(UnixStream::connect(path)?),
            Self::Abstract(name) => {
                PeerStream::unix(UnixStream::connect_addr(&UnixAddr::from_abstract_name(name)?)?)
            }
        }
    }
}

/// Non-blocking listening socket of an endpoint.
#[derive(Debug)]
pub(crate) enum PeerListener {
    /// Listener of a `tcp://` endpoint.
    Tcp(TcpListener),
    /// Listener of `ipc://`, with the path of the socket file, which is removed when the listener is dropped.
    Unix(UnixListener, Option<PathBuf>),
}

impl PeerListener {
    /// Opens a listening socket at an address.
    ///
    /// Errors: the address is in use, or not one of this machine.
    pub(crate) fn bind(address: &PeerAddress) -> io::Result<Self> {
        let listener = match address {
            PeerAddress::Tcp { host, port } => {
                Self::Tcp(TcpListener::bind(&PeerAddress::resolve(host, *port)?[..])?)
            }
            PeerAddress::Path(path) => {
                remove_stale(path);
                Self::Unix(UnixListener::bind(path)?, Some(path.clone()))
            }
            PeerAddress::Abstract(name) => {
                let address = UnixAddr::from_abstract_name(name)?;
                Self::Unix(UnixListener::bind_addr(&address)?, None)
            }
        };
        match &listener {
            Self::Tcp(tcp) => tcp.set_nonblocking(true)?,
            Self::Unix(unix, _) => unix.set_nonblocking(true)?,
        }
        Ok(listener)
    }

    /// Endpoint to which peers connect; `None` if it equals the configured one.
    pub(crate) fn endpoint(&self) -> Option<String> {
        match self {
            Self::Tcp(tcp) => tcp.local_addr().ok().map(|address| format!("tcp://{address}")),
            Self::Unix(..) => None,
        }
    }

    /// Accepts the next pending connection.
    ///
    /// Errors: `WouldBlock` if none is pending; other errors, such as no file descriptor available.
    pub(crate) fn accept(&self) -> io::Result<PeerStream> {
        match self {
            Self::Tcp(tcp) => PeerStream::tcp(tcp.accept()?.0),
            Self::Unix(unix, _) => PeerStream::unix(unix.accept()?.0),
        }
    }
}

impl AsFd for PeerListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(tcp) => tcp.as_fd(),
            Self::Unix(unix, _) => unix.as_fd(),
        }
    }
}

impl Drop for PeerListener {
    fn drop(&mut self) {
        if let Self::Unix(_, Some(path)) = self {
            // The removal fails if the file has been removed already.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Removes the socket file that a previous process has left at `path`.
fn remove_stale(path: &Path) {
    let is_socket = std::fs::metadata(path).is_ok_and(|file| file.file_type().is_socket());
    if is_socket && UnixStream::connect(path).is_err() {
        // If the removal fails, `bind` reports the remaining file.
        let _ = std::fs::remove_file(path);
    }
}

/// Non-blocking stream to a peer.
#[derive(Debug)]
pub(crate) enum PeerStream {
    /// Stream of a `tcp://` endpoint.
    Tcp(TcpStream),
    /// Stream of an `ipc://` endpoint.
    Unix(UnixStream),
}

impl PeerStream {
    fn tcp(stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        let keepalive = TcpKeepalive::new()
            .with_time(KEEPALIVE_IDLE)
            .with_interval(KEEPALIVE_INTERVAL)
            .with_retries(KEEPALIVE_PROBES);
        SockRef::from(&stream).set_tcp_keepalive(&keepalive)?;
        Ok(Self::Tcp(stream))
    }

    fn unix(stream: UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self::Unix(stream))
    }

    pub(super) fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(tcp) => tcp.read(buffer),
            Self::Unix(unix) => unix.read(buffer),
        }
    }

    pub(super) fn write(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Self::Tcp(tcp) => tcp.write_vectored(slices),
            Self::Unix(unix) => unix.write_vectored(slices),
        }
    }
}

impl AsFd for PeerStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(tcp) => tcp.as_fd(),
            Self::Unix(unix) => unix.as_fd(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_tcp_or_ipc() {
        let tcp = |host: &str, port| Some(PeerAddress::Tcp { host: host.to_owned(), port });
        assert_eq!(PeerAddress::parse("tcp://*:5557"), tcp("*", 5557));
        assert_eq!(PeerAddress::parse("tcp://[::1]:0"), tcp("::1", 0));
        assert_eq!(PeerAddress::parse("ipc:///a/b"), Some(PeerAddress::Path("/a/b".into())));
        assert_eq!(PeerAddress::parse("ipc://@a"), Some(PeerAddress::Abstract("a".to_owned())));
        assert_eq!(PeerAddress::parse("inproc://a"), None);
    }

    #[test]
    fn a_stale_ipc_file_is_replaced_and_a_live_one_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("events");
        drop(UnixListener::bind(&path).unwrap());
        let address = PeerAddress::Path(path.clone());
        let listener = PeerListener::bind(&address).unwrap();
        let again = PeerListener::bind(&address).unwrap_err();
        assert_eq!(again.kind(), io::ErrorKind::AddrInUse);
        drop(listener);
        assert!(!path.exists());
    }
}
