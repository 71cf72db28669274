//! How the ranks of a group on several hosts connect: every rank listens, the ranks exchange the addresses of their listeners, and
//! each rank connects to one rank of every other host.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::sockopt;

use crate::CollectiveError;
use crate::tcp_mesh::MirroredRank;

/// Identifies a connection between ranks.
const MAGIC: [u8; 4] = *b"HDRM";
/// Bytes of the secret that a rank expects from those that connect to it.
pub const MESH_TOKEN_BYTES: usize = 32;
/// Bytes of the first message of a connection: magic, token, index of the group, index of the sending rank in it.
const HELLO_BYTES: usize = MAGIC.len() + MESH_TOKEN_BYTES + 8;
/// Maximum time until all ranks have connected.
const CONNECT_TIMEOUT: Duration = Duration::from_mins(1);
/// Maximum time in which an accepted connection must send its first message. A stranger delays the start of the group by at most this time.
const HELLO_TIMEOUT: Duration = Duration::from_millis(500);
/// Timeout of one attempt to connect.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(5);
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Time without an acknowledgement after which a connection has failed.
const DEAD_LINK_TIME: Duration = Duration::from_secs(10);
/// Interval of keep-alive probes of an idle connection, the number of which limits `DEAD_LINK_TIME`.
const PROBE_INTERVAL: Duration = Duration::from_secs(2);
const PROBES: u32 = 5;

/// Address at which other ranks reach a rank, and the secret that they must present.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MeshEndpoint {
    /// Host name or IP address, and port.
    pub address: String,
    /// Secret of the listener.
    pub token: [u8; MESH_TOKEN_BYTES],
}

/// Listener of one rank for the connections from ranks of other hosts.
#[derive(Debug)]
pub struct MeshListener {
    listener: TcpListener,
    endpoint: MeshEndpoint,
}

/// Connection that a rank expects: from the rank `rank` of the group `group`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ExpectedPeer {
    pub(crate) group: usize,
    pub(crate) rank: usize,
}

impl MeshListener {
    /// Listens on a free port. `host` is the name or IP address at which other hosts reach this one.
    ///
    /// Errors: no socket or no randomness is available.
    pub fn bind(host: &str) -> Result<Self, CollectiveError> {
        let open = || -> io::Result<Self> {
            // The address itself if it is one of this host, so that other networks do not reach the listener.
            let any = SocketAddr::from(([0, 0, 0, 0], 0));
            let own = host.parse::<IpAddr>().map(|ip| SocketAddr::from((ip, 0)));
            let listener = own.map_or_else(|_| TcpListener::bind(any), TcpListener::bind)?;
            listener.set_nonblocking(true)?;
            let mut token = [0; MESH_TOKEN_BYTES];
            std::fs::File::open("/dev/urandom")?.read_exact(&mut token)?;
            let port = listener.local_addr()?.port();
            let name = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
            Ok(Self {
                listener,
                endpoint: MeshEndpoint { address: format!("{name}:{port}"), token },
            })
        };
        open().map_err(|error| CollectiveError::Listen {
            host: host.to_owned(),
            error: error.to_string(),
        })
    }

    /// Address and secret of this listener.
    #[must_use]
    pub fn endpoint(&self) -> &MeshEndpoint {
        &self.endpoint
    }

    /// Accepts connections until all of `expected` have arrived. Connections without the secret are closed.
    pub(crate) fn accept(
        &self,
        mut expected: Vec<ExpectedPeer>,
    ) -> Result<Vec<MirroredRank>, CollectiveError> {
        let deadline = Instant::now() + CONNECT_TIMEOUT;
        let mut accepted = Vec::new();
        while let Some(&ExpectedPeer { rank, .. }) = expected.first() {
            if Instant::now() > deadline {
                let seconds = CONNECT_TIMEOUT.as_secs();
                return Err(CollectiveError::PeerMissing { rank, seconds });
            }
            let Ok((stream, _)) = self.listener.accept() else {
                thread::sleep(POLL_INTERVAL);
                continue;
            };
            let Ok(Some(peer)) = read_hello(&stream, &self.endpoint.token) else { continue };
            let Some(index) = expected.iter().position(|expected| *expected == peer) else {
                continue;
            };
            expected.swap_remove(index);
            let ExpectedPeer { group, rank } = peer;
            accepted.push(MirroredRank { group, rank, stream });
        }
        Ok(accepted)
    }
}

/// Connects to the listener of rank `rank` as the sender `own`.
pub(crate) fn connect(
    endpoint: &MeshEndpoint,
    rank: usize,
    own: ExpectedPeer,
) -> Result<TcpStream, CollectiveError> {
    let deadline = Instant::now() + CONNECT_TIMEOUT;
    loop {
        match open(endpoint, own) {
            Ok(stream) => return Ok(stream),
            Err(_) if Instant::now() < deadline => thread::sleep(POLL_INTERVAL),
            Err(error) => {
                let (address, error) = (endpoint.address.clone(), error.to_string());
                return Err(CollectiveError::PeerUnreachable { rank, address, error });
            }
        }
    }
}

fn open(endpoint: &MeshEndpoint, own: ExpectedPeer) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the host name has no address");
    for address in endpoint.address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, ATTEMPT_TIMEOUT) {
            Ok(mut stream) => {
                prepare(&stream)?;
                let indices = [own.group, own.rank].map(|index| (index as u32).to_le_bytes());
                let hello = [&MAGIC[..], &endpoint.token, &indices.concat()].concat();
                stream.write_all(&hello)?;
                return Ok(stream);
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Reads the first message of a connection. Returns `None` if it does not have the secret.
fn read_hello(mut stream: &TcpStream, token: &[u8]) -> io::Result<Option<ExpectedPeer>> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(HELLO_TIMEOUT))?;
    let mut hello = [0; HELLO_BYTES];
    stream.read_exact(&mut hello)?;
    stream.set_read_timeout(None)?;
    prepare(stream)?;
    let (magic, rest) = hello.split_at(MAGIC.len());
    let (theirs, indices) = rest.split_at(MESH_TOKEN_BYTES);
    // All bytes are compared, so that the time does not depend on the position of a difference.
    let difference = theirs.iter().zip(token).fold(0, |bits, (a, b)| bits | (a ^ b));
    if magic != MAGIC || difference != 0 {
        return Ok(None);
    }
    let index =
        |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| indices[at + byte])) as usize;
    Ok(Some(ExpectedPeer { group: index(0), rank: index(4) }))
}

/// Sends without delay, and detects a peer that no longer answers.
fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let socket = stream.as_fd();
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, PROBE_INTERVAL)?;
    sockopt::set_tcp_keepintvl(socket, PROBE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(socket, PROBES)?;
    sockopt::set_tcp_user_timeout(socket, DEAD_LINK_TIME.as_millis() as u32)?;
    Ok(())
}
