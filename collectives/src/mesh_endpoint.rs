//! How the ranks of a group on several nodes connect: every rank listens, the ranks exchange the addresses of their listeners, and
//! each rank connects to one rank of every other node.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
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
/// Answer to the first message.
const ACCEPTED: u8 = 1;
/// Maximum time until all ranks have connected.
const CONNECT_TIMEOUT: Duration = Duration::from_mins(1);
/// Maximum time in which an accepted connection must send its first message.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of connections that have not sent their first message; further ones are closed.
const PENDING_MAX: usize = 64;
/// Timeout of one attempt to connect, and of the answer to it.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(5);
const RETRY_INTERVAL: Duration = Duration::from_millis(200);
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Time without an acknowledgement after which a connection has failed.
const DEAD_LINK_TIME: Duration = Duration::from_secs(10);
/// Interval and number of keep-alive probes of an idle connection.
const PROBE_INTERVAL: Duration = Duration::from_secs(2);
const PROBES: u32 = 5;

/// Address at which other ranks reach a rank, and the secret that they must present. `Debug` does not reveal the secret.
#[derive(Clone, PartialEq, Eq)]
pub struct MeshEndpoint {
    /// Host name or IP address, and port.
    pub address: String,
    /// Secret of the listener.
    pub token: [u8; MESH_TOKEN_BYTES],
}

impl fmt::Debug for MeshEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MeshEndpoint").field("address", &self.address).finish_non_exhaustive()
    }
}

/// Listener of one rank for the connections from ranks of other nodes.
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
    pub(crate) world_rank: usize,
}

/// Connection that has not sent its whole first message.
struct PendingPeer {
    stream: TcpStream,
    hello: Vec<u8>,
    accepted_at: Instant,
    is_closed: bool,
}

impl MeshListener {
    /// Listens on a free port. `host` is the name or IP address at which other nodes reach this one.
    ///
    /// Errors: the host is not an address of this node, or no socket or no randomness is available.
    pub fn bind(host: &str) -> Result<Self, CollectiveError> {
        let open = || -> io::Result<Self> {
            let addresses: Vec<SocketAddr> = (host, 0).to_socket_addrs()?.collect();
            let listener = TcpListener::bind(&addresses[..])?;
            listener.set_nonblocking(true)?;
            let mut token = [0; MESH_TOKEN_BYTES];
            std::fs::File::open("/dev/urandom")?.read_exact(&mut token)?;
            let port = listener.local_addr()?.port();
            let name = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
            let endpoint = MeshEndpoint { address: format!("{name}:{port}"), token };
            Ok(Self { listener, endpoint })
        };
        let failed = |error: io::Error| CollectiveError::Listen {
            host: host.to_owned(),
            error: error.to_string(),
        };
        open().map_err(failed)
    }

    /// Address and secret of this listener.
    #[must_use]
    pub fn endpoint(&self) -> &MeshEndpoint {
        &self.endpoint
    }

    /// Accepts connections until all of `expected` have arrived or `is_cancelled` is set. Connections without the secret are
    /// closed.
    pub(crate) fn accept(
        &self,
        mut expected: Vec<ExpectedPeer>,
        is_cancelled: &AtomicBool,
    ) -> Result<Vec<MirroredRank>, CollectiveError> {
        let deadline = Instant::now() + CONNECT_TIMEOUT;
        let (mut pending, mut accepted) = (Vec::new(), Vec::new());
        while let Some(&ExpectedPeer { world_rank, .. }) = expected.first() {
            if is_cancelled.load(Ordering::Relaxed) || Instant::now() > deadline {
                let seconds = CONNECT_TIMEOUT.as_secs();
                return Err(CollectiveError::PeerMissing { rank: world_rank, seconds });
            }
            self.accept_pending(&mut pending);
            let complete = pending.extract_if(.., PendingPeer::is_complete).collect::<Vec<_>>();
            pending.retain(PendingPeer::is_open);
            if complete.is_empty() {
                thread::sleep(POLL_INTERVAL);
            }
            for PendingPeer { stream, hello, .. } in complete {
                let peer = expected_peer(&hello, &self.endpoint.token, &expected);
                let Some(index) = peer.filter(|_| admit(&stream).is_ok()) else { continue };
                let ExpectedPeer { group, rank, .. } = expected.swap_remove(index);
                accepted.push(MirroredRank { group, rank, stream });
            }
        }
        Ok(accepted)
    }

    /// Accepts the connections that wait in the backlog.
    fn accept_pending(&self, pending: &mut Vec<PendingPeer>) {
        while let Ok((stream, _)) = self.listener.accept() {
            if pending.len() < PENDING_MAX && stream.set_nonblocking(true).is_ok() {
                let (hello, accepted_at) = (Vec::new(), Instant::now());
                pending.push(PendingPeer { stream, hello, accepted_at, is_closed: false });
            }
        }
    }
}

impl PendingPeer {
    /// Reads what has arrived. Returns whether the first message is complete.
    fn is_complete(&mut self) -> bool {
        let mut bytes = [0; HELLO_BYTES];
        let missing = HELLO_BYTES - self.hello.len();
        match (&self.stream).read(&mut bytes[..missing]) {
            Ok(0) => self.is_closed = true,
            Ok(count) => self.hello.extend_from_slice(&bytes[..count]),
            Err(error) => self.is_closed = error.kind() != io::ErrorKind::WouldBlock,
        }
        self.hello.len() == HELLO_BYTES
    }

    /// Whether the connection may still send its first message.
    fn is_open(&self) -> bool {
        !self.is_closed && self.accepted_at.elapsed() < HELLO_TIMEOUT
    }
}

/// Answers the first message of a connection, and prepares the connection for chunks.
fn admit(mut stream: &TcpStream) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    prepare(stream)?;
    stream.write_all(&[ACCEPTED])
}

/// Index in `expected` of the peer that sent `hello`; `None` if the secret is wrong, or if the peer is not expected.
fn expected_peer(
    hello: &[u8],
    token: &[u8; MESH_TOKEN_BYTES],
    expected: &[ExpectedPeer],
) -> Option<usize> {
    let (magic, rest) = hello.split_at(MAGIC.len());
    let (theirs, indices) = rest.split_at(MESH_TOKEN_BYTES);
    // All bytes are compared, so that the time does not depend on the position of a difference.
    let difference = theirs.iter().zip(token).fold(0, |bits, (a, b)| bits | (a ^ b));
    if magic != MAGIC || difference != 0 {
        return None;
    }
    let index =
        |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| indices[at + byte])) as usize;
    expected.iter().position(|peer| peer.group == index(0) && peer.rank == index(4))
}

/// Connects to the listener of the rank with the world rank `rank`, as the sender `own`, and waits until it has accepted.
pub(crate) fn connect(
    endpoint: &MeshEndpoint,
    rank: usize,
    own: ExpectedPeer,
) -> Result<TcpStream, CollectiveError> {
    let deadline = Instant::now() + CONNECT_TIMEOUT;
    loop {
        match open(endpoint, own) {
            Ok(stream) => return Ok(stream),
            Err(_) if Instant::now() < deadline => thread::sleep(RETRY_INTERVAL),
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
                stream.set_read_timeout(Some(ATTEMPT_TIMEOUT))?;
                stream.read_exact(&mut [0])?;
                stream.set_read_timeout(None)?;
                return Ok(stream);
            }
            Err(error) => last = error,
        }
    }
    Err(last)
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
