//! Connections from a worker node to node 0, which runs the scheduler and the HTTP server.

use super::HANDSHAKE_TIME;
use super::cluster::{ClusterConfig, ClusterSecret};
use super::handshake::{HandshakeError, introduce};
use protocol::NodeEvent;
use std::io;
use std::net::{TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

/// Connect timeout for each address to which the host name of node 0 resolves.
const CONNECT_TIME: Duration = Duration::from_secs(3);
/// Time between two attempts to reach node 0.
pub(super) const RETRY_INTERVAL: Duration = Duration::from_millis(200);

/// Reason why a connection to node 0 failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum DialError {
    /// Node 0 does not accept connections, possibly because it is still starting.
    #[error("node 0 at {address} is unreachable: {error}")]
    Unreachable {
        /// Address of node 0.
        address: String,
        /// Error of the operating system.
        error: io::Error,
    },
    /// The connection was made, but the handshake failed.
    #[error("node 0 at {address}: {error}")]
    Handshake {
        /// Address of node 0.
        address: String,
        /// Error of the handshake.
        error: HandshakeError,
    },
}

impl DialError {
    /// Whether a retry can succeed: node 0 was unreachable, or too busy to complete the handshake.
    pub(super) fn is_transient(&self) -> bool {
        match self {
            Self::Unreachable { .. } => true,
            Self::Handshake { error, .. } => matches!(
                error,
                HandshakeError::TimedOut
                    | HandshakeError::Io(_)
                    | HandshakeError::Link(
                        protocol::link::LinkError::Closed | protocol::link::LinkError::Io(_)
                    )
            ),
        }
    }
}

/// Opens authenticated connections to node 0.
#[derive(Debug, Clone)]
pub(super) struct NodeDialer {
    host: String,
    port: u16,
    secret: ClusterSecret,
}

impl NodeDialer {
    /// Creates a dialer for node 0 of the given cluster.
    pub(super) fn new(cluster: &ClusterConfig, secret: ClusterSecret) -> Self {
        Self { host: cluster.host.clone(), port: cluster.port, secret }
    }

    /// Opens an authenticated connection for `purpose`. Bytes that follow the handshake have not been read
    /// from the connection.
    pub(super) fn connect(&self, purpose: NodeEvent) -> Result<TcpStream, DialError> {
        let address = || format!("{}:{}", self.host, self.port);
        let stream = self
            .open_stream()
            .map_err(|error| DialError::Unreachable { address: address(), error })?;
        introduce(&stream, &self.secret, purpose, HANDSHAKE_TIME)
            .map_err(|error| DialError::Handshake { address: address(), error })?;
        Ok(stream)
    }

    /// Connects like `connect`, but retries for up to `time`: node 0 closes new connections while it has the
    /// maximum number of unauthenticated connections.
    pub(super) fn connect_with_retries(
        &self,
        purpose: &NodeEvent,
        time: Duration,
    ) -> Result<TcpStream, DialError> {
        let began = Instant::now();
        loop {
            match self.connect(purpose.clone()) {
                Err(error) if error.is_transient() && began.elapsed() < time => {
                    thread::sleep(RETRY_INTERVAL);
                }
                outcome => return outcome,
            }
        }
    }

    fn open_stream(&self) -> io::Result<TcpStream> {
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the host name has no address");
        for address in (self.host.as_str(), self.port).to_socket_addrs()? {
            match TcpStream::connect_timeout(&address, CONNECT_TIME) {
                Ok(stream) => {
                    stream.set_nodelay(true)?;
                    return Ok(stream);
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }
}

#[cfg(test)]
mod tests {
    use super::super::EPOCH;
    use super::super::handshake::admit;
    use super::*;
    use crate::deadlines::BoundedJoin as _;
    use protocol::NodeHandshake;
    use protocol::link::{FrameReader, FrameWriter, MessageSender};
    use std::net::TcpListener;

    const LONG: Duration = Duration::from_mins(1);
    /// Cluster secret of node 0.
    const SECRET: &str = "0123456789abcdef";

    fn listener_and_dialer(secret: &str) -> (TcpListener, NodeDialer) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (host, node_address) = ("127.0.0.1".to_owned(), None);
        let cluster = ClusterConfig { nodes: 2, node: 1, host, port, node_address };
        (listener, NodeDialer::new(&cluster, ClusterSecret::new(secret)))
    }

    #[test]
    fn full_listener_is_retried() {
        let (listener, dialer) = listener_and_dialer(SECRET);
        let server = thread::spawn(move || {
            drop(listener.accept().unwrap());
            // Close the second connection after its response was read: node 0 has then neither accepted nor
            // rejected the secret, so the dialer must retry.
            let (stream, _) = listener.accept().unwrap();
            FrameWriter::new(&stream, EPOCH)
                .send(NodeHandshake::Challenge { nonce: [0; 32] })
                .unwrap();
            let mut from = FrameReader::<_, NodeHandshake>::new(&stream, EPOCH);
            assert!(matches!(from.receive(), Ok(Some(NodeHandshake::Response { .. }))));
            drop(stream);
            admit(&listener.accept().unwrap().0, &ClusterSecret::new(SECRET), LONG).unwrap()
        });
        dialer.connect_with_retries(&NodeEvent::Heartbeat, LONG).unwrap();
        assert_eq!(server.join_bounded(), NodeEvent::Heartbeat);
    }

    #[test]
    fn wrong_secret_is_not_retried() {
        let (listener, dialer) = listener_and_dialer("0123456789abcdeF");
        let server = thread::spawn(move || {
            let result = admit(&listener.accept().unwrap().0, &ClusterSecret::new(SECRET), LONG);
            listener.set_nonblocking(true).unwrap();
            (result.is_err(), listener)
        });
        let error =
            dialer.connect_with_retries(&NodeEvent::Heartbeat, LONG).unwrap_err().to_string();
        assert!(error.ends_with("does not have the cluster secret"), "{error}");
        let (rejected, listener) = server.join_bounded();
        assert!(rejected && listener.accept().is_err(), "retried");
    }
}
