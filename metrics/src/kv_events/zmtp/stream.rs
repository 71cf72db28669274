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

/// A peer whose machine has vanished is noticed after about two minutes.
const KEEPALIVE_IDLE: Duration = Duration::from_mins(1);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(15);
const KEEPALIVE_PROBES: u32 = 4;
/// Longest wait for a peer that is connected to.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Where a socket is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PeerAddress {
    /// `tcp://HOST:PORT`; `*` is any IPv4 address of this machine.
    Tcp {
        /// Name or address, without brackets.
        host: String,
        /// 0 = the system chooses one.
        port: u16,
    },
    /// `ipc://PATH`.
    Path(PathBuf),
    /// `ipc://@NAME`, in the abstract namespace of Linux.
    Abstract(String),
}

impl PeerAddress {
    /// Reads an endpoint whose shape has been checked; `None` if it is none of these.
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

    /// Addresses of a host; of a name those of IPv4 first, as libzmq has it.
    fn resolve(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
        if host == "*" {
            return Ok(vec![(Ipv4Addr::UNSPECIFIED, port).into()]);
        }
        let mut addresses: Vec<_> = (host, port).to_socket_addrs()?.collect();
        addresses.sort_by_key(SocketAddr::is_ipv6);
        Ok(addresses)
    }

    /// Connects, waiting at most some seconds for each address.
    ///
    /// Errors: no address answers.
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

/// A socket that waits for peers.
#[derive(Debug)]
pub(crate) enum PeerListener {
    /// Of `tcp://`.
    Tcp(TcpListener),
    /// Of `ipc://`; the file is removed with it.
    Unix(UnixListener, Option<PathBuf>),
}

impl PeerListener {
    /// Listens at an address.
    ///
    /// Errors: it is in use, or none of this machine.
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

    /// The endpoint that peers connect to; `None` where it is as it was asked for.
    pub(crate) fn endpoint(&self) -> Option<String> {
        match self {
            Self::Tcp(tcp) => tcp.local_addr().ok().map(|address| format!("tcp://{address}")),
            Self::Unix(..) => None,
        }
    }

    /// The next peer that has connected.
    ///
    /// Errors: `WouldBlock` if there is none; others, such as no descriptor left.
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
            // Somebody may have removed it.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Removes the socket of a process that has ended without removing it.
fn remove_stale(path: &Path) {
    let is_socket = std::fs::metadata(path).is_ok_and(|file| file.file_type().is_socket());
    if is_socket && UnixStream::connect(path).is_err() {
        // `bind` names what is in its way.
        let _ = std::fs::remove_file(path);
    }
}

/// A connection that never blocks.
#[derive(Debug)]
pub(crate) enum PeerStream {
    /// Of `tcp://`.
    Tcp(TcpStream),
    /// Of `ipc://`.
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
