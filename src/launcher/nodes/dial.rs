//! Connections from another node to node 0.

use super::HANDSHAKE_TIME;
use super::handshake::{HandshakeError, introduce};
use crate::config::{Cluster, Secret};
use protocol::FromNode;
use std::io;
use std::net::{TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

/// Until a connection stands, to each address that node 0's name has.
const CONNECT_TIME: Duration = Duration::from_secs(3);
/// Between two tries to reach node 0.
pub(super) const RETRY: Duration = Duration::from_millis(200);

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub(super) enum DialError {
    /// Nobody is there, or not yet.
    #[error("node 0 at {place} does not answer: {error}")]
    Absent {
        /// Where it should be.
        place: String,
        /// What the system says.
        error: io::Error,
    },
    /// Somebody is there.
    #[error("node 0 at {place}: {error}")]
    Handshake {
        /// Where.
        place: String,
        /// What is wrong with it.
        error: HandshakeError,
    },
}

impl DialError {
    /// Whether another try may do: nobody was there, or had no time.
    pub(super) fn is_passing(&self) -> bool {
        match self {
            Self::Absent { .. } => true,
            Self::Handshake { error, .. } => matches!(
                error,
                HandshakeError::Late
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
pub(super) struct Dial {
    host: String,
    port: u16,
    secret: Secret,
}

impl Dial {
    /// The way to node 0 of a cluster.
    pub(super) fn new(cluster: &Cluster, secret: Secret) -> Self {
        Self { host: cluster.host.clone(), port: cluster.port, secret }
    }

    /// A connection for this purpose, over which nothing has been heard yet.
    pub(super) fn connect(&self, purpose: FromNode) -> Result<TcpStream, DialError> {
        let place = || format!("{}:{}", self.host, self.port);
        let stream = self.reach().map_err(|error| DialError::Absent { place: place(), error })?;
        introduce(&stream, &self.secret, purpose, HANDSHAKE_TIME)
            .map_err(|error| DialError::Handshake { place: place(), error })?;
        Ok(stream)
    }

    /// The same, tried for so long: node 0 turns away whom it has no place for at the moment.
    pub(super) fn insist(
        &self,
        purpose: &FromNode,
        time: Duration,
    ) -> Result<TcpStream, DialError> {
        let began = Instant::now();
        loop {
            match self.connect(purpose.clone()) {
                Err(error) if error.is_passing() && began.elapsed() < time => thread::sleep(RETRY),
                outcome => return outcome,
            }
        }
    }

    fn reach(&self) -> io::Result<TcpStream> {
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
    use protocol::Handshake;
    use protocol::link::{FrameReader, FrameWriter, Sending};
    use std::net::TcpListener;

    const LONG: Duration = Duration::from_mins(1);

    fn dial(secret: &str) -> (TcpListener, Dial) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let cluster = Cluster { nodes: 2, node: 1, host: "127.0.0.1".to_owned(), port };
        (listener, Dial::new(&cluster, Secret::new(secret)))
    }

    #[test]
    fn a_door_that_was_full_is_tried_again_and_a_wrong_secret_is_not() {
        let ours = "0123456789abcdef";
        let (listener, way) = dial(ours);
        let door = thread::spawn(move || {
            drop(listener.accept().unwrap());
            // One that dies when it has heard the answer has said nothing of the secret, either.
            let (dying, _) = listener.accept().unwrap();
            FrameWriter::new(&dying, EPOCH).send(Handshake::Challenge { nonce: [0; 32] }).unwrap();
            let mut from = FrameReader::<_, Handshake>::new(&dying, EPOCH);
            assert!(matches!(from.receive(), Ok(Some(Handshake::Answer { .. }))));
            drop(dying);
            admit(&listener.accept().unwrap().0, &Secret::new(ours), LONG).unwrap()
        });
        way.insist(&FromNode::Beat, LONG).unwrap();
        assert_eq!(door.join().unwrap(), FromNode::Beat);

        let (listener, way) = dial("0123456789abcdeF");
        let door = thread::spawn(move || {
            let met = admit(&listener.accept().unwrap().0, &Secret::new(ours), LONG);
            listener.set_nonblocking(true).unwrap();
            (met.is_err(), listener)
        });
        let error = way.insist(&FromNode::Beat, LONG).unwrap_err().to_string();
        assert!(error.ends_with("does not know the secret"), "{error}");
        let (refused, listener) = door.join().unwrap();
        assert!(refused && listener.accept().is_err(), "came again");
    }
}
