//! Connections from another node to node 0.

use super::HANDSHAKE_TIME;
use super::cluster::{ClusterConfig, ClusterSecret};
use super::handshake::{HandshakeError, introduce};
use protocol::NodeEvent;
use std::io;
use std::net::{TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

/// Until a connection stands, to each address that node 0's name has.
const CONNECT_TIME: Duration = Duration::from_secs(3);
/// Between two tries to reach node 0.
pub(super) const RETRY_INTERVAL: Duration = Duration::from_millis(200);

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub(super) enum DialError {
    /// Nobody is there, or not yet.
    #[error("node 0 at {address} does not answer: {error}")]
    Unreachable {
        /// Where it should be.
        address: String,
        /// What the system says.
        error: io::Error,
    },
    /// Somebody is there.
    #[error("node 0 at {address}: {error}")]
    Handshake {
        /// Where.
        address: String,
        /// What is wrong with it.
        error: HandshakeError,
    },
}

impl DialError {
    /// Whether another try may do: nobody was there, or had no time.
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

/// Where node 0 is, and what it must know.
#[derive(Debug, Clone)]
pub(super) struct NodeDialer {
    host: String,
    port: u16,
    secret: ClusterSecret,
}

impl NodeDialer {
    /// The way to node 0 of a cluster.
    pub(super) fn new(cluster: &ClusterConfig, secret: ClusterSecret) -> Self {
        Self { host: cluster.host.clone(), port: cluster.port, secret }
    }

    /// A connection for this purpose, over which nothing has been heard yet.
    pub(super) fn connect(&self, purpose: NodeEvent) -> Result<TcpStream, DialError> {
        let place = || format!("{}:{}", self.host, self.port);
        let stream = self
            .open_stream()
            .map_err(|error| DialError::Unreachable { address: place(), error })?;
        introduce(&stream, &self.secret, purpose, HANDSHAKE_TIME)
            .map_err(|error| DialError::Handshake { address: place(), error })?;
        Ok(stream)
    }

    /// The same, tried for so long: node 0 turns away whom it has no place for at the moment.
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
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
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
    use protocol::NodeHandshake;
    use protocol::link::{FrameReader, FrameWriter, MessageSender};
    use std::net::TcpListener;

    const LONG: Duration = Duration::from_mins(1);

    fn dialer(secret: &str) -> (TcpListener, NodeDialer) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let cluster = ClusterConfig { nodes: 2, node: 1, host: "127.0.0.1".to_owned(), port };
        (listener, NodeDialer::new(&cluster, ClusterSecret::new(secret)))
    }

    #[test]
    fn full_listener_is_retried_but_wrong_secret_is_not() {
        let ours = "0123456789abcdef";
        let (listener, way) = dialer(ours);
        let door = thread::spawn(move || {
            drop(listener.accept().unwrap());
            // One that dies when it has heard the answer has said nothing of the secret, either.
            let (dying, _) = listener.accept().unwrap();
            FrameWriter::new(&dying, EPOCH)
                .send(NodeHandshake::Challenge { nonce: [0; 32] })
                .unwrap();
            let mut from = FrameReader::<_, NodeHandshake>::new(&dying, EPOCH);
            assert!(matches!(from.receive(), Ok(Some(NodeHandshake::Response { .. }))));
            drop(dying);
            admit(&listener.accept().unwrap().0, &ClusterSecret::new(ours), LONG).unwrap()
        });
        way.connect_with_retries(&NodeEvent::Heartbeat, LONG).unwrap();
        assert_eq!(door.join().unwrap(), NodeEvent::Heartbeat);

        let (listener, way) = dialer("0123456789abcdeF");
        let door = thread::spawn(move || {
            let met = admit(&listener.accept().unwrap().0, &ClusterSecret::new(ours), LONG);
            listener.set_nonblocking(true).unwrap();
            (met.is_err(), listener)
        });
        let error = way.connect_with_retries(&NodeEvent::Heartbeat, LONG).unwrap_err().to_string();
        assert!(error.ends_with("does not know the secret"), "{error}");
        let (refused, listener) = door.join().unwrap();
        assert!(refused && listener.accept().is_err(), "came again");
    }
}
