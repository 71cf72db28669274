//! Handshake of a connection between nodes. The messages are: challenge, response, welcome, and the purpose
//! of the connection.
//!
//! The connecting node proves first that it has the secret, so an unauthenticated peer learns nothing from
//! node 0. Node 0 reads at most a few hundred bytes from an unauthenticated peer and waits for the peer no
//! longer than the deadline.

use super::cluster::ClusterSecret;
use super::deadline_stream::{DeadlineStream, clear_timeouts};
use super::hmac_proof::{HandshakeSide, NoncePair, is_proof, nonce, prove};
use super::{BODY_BYTES_MAX, EPOCH};
use protocol::codec::WireMessage;
use protocol::frame::FrameError;
use protocol::link::{FrameReader, FrameWriter, LinkError, MessageSender};
use protocol::{NodeEvent, NodeHandshake};
use std::io;
use std::net::TcpStream;
use std::time::Duration;

/// Maximum length in bytes of a message body from an unauthenticated peer. The longest message is a response
/// with 64 bytes, each of which is encoded as an integer.
const UNAUTHENTICATED_BYTES_MAX: usize = 512;

/// Reason why a handshake failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum HandshakeError {
    /// The peer does not have the cluster secret.
    #[error("the peer does not have the cluster secret")]
    WrongSecret,
    /// The peer sent a message that is not valid at this point of the handshake.
    #[error("unexpected message during the handshake")]
    OutOfOrder,
    /// The peer did not complete the handshake by the deadline.
    #[error("the handshake timed out")]
    TimedOut,
    /// The peer closed the connection, or uses another protocol or another protocol version.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// The operating system reported an error.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl HandshakeError {
    /// Whether the peer is not a node at all, such as a port scanner or a probe.
    pub(super) fn is_not_a_node(&self) -> bool {
        let version = matches!(self, Self::Link(LinkError::Frame(FrameError::Version { .. })));
        !version && !matches!(self, Self::WrongSecret)
    }
}

/// Handshake on node 0: returns the purpose of the connection after the other node has proved that it has the
/// secret.
pub(super) fn admit(
    stream: &TcpStream,
    secret: &ClusterSecret,
    time: Duration,
) -> Result<NodeEvent, HandshakeError> {
    let deadline_stream = DeadlineStream::new(stream, time);
    let mut to = FrameWriter::new(deadline_stream.opposite_direction(), EPOCH);
    let mut from = FrameReader::with_body_limit(deadline_stream, EPOCH, UNAUTHENTICATED_BYTES_MAX);
    let node_zero = nonce()?;
    to.send(NodeHandshake::Challenge { nonce: node_zero })?;
    let NodeHandshake::Response { nonce: worker_node, proof } = next(&mut from)? else {
        return Err(HandshakeError::OutOfOrder);
    };
    let nonces = NoncePair { node_zero, worker_node };
    if !is_proof(secret, HandshakeSide::WorkerNode, &nonces, &proof) {
        // Report the denial explicitly, because the other node would retry if the connection were only
        // closed. The send fails if the peer has already closed the connection.
        let _ = to.send(NodeHandshake::Denied);
        return Err(HandshakeError::WrongSecret);
    }
    to.send(NodeHandshake::Welcome { proof: prove(secret, HandshakeSide::NodeZero, &nonces) })?;
    let mut from = from.with_message_type().set_body_limit(BODY_BYTES_MAX);
    let purpose = next(&mut from)?;
    clear_timeouts(stream)?;
    Ok(purpose)
}

/// Runs the handshake on a worker node: proves that this node has the secret, verifies node 0's proof and
/// sends the purpose of the connection. Reads nothing after node 0's welcome.
pub(super) fn introduce(
    stream: &TcpStream,
    secret: &ClusterSecret,
    purpose: NodeEvent,
    time: Duration,
) -> Result<(), HandshakeError> {
    let deadline_stream = DeadlineStream::new(stream, time);
    let mut to = FrameWriter::new(deadline_stream.opposite_direction(), EPOCH);
    let mut from = FrameReader::with_body_limit(deadline_stream, EPOCH, UNAUTHENTICATED_BYTES_MAX);
    let NodeHandshake::Challenge { nonce: node_zero } = next(&mut from)? else {
        return Err(HandshakeError::OutOfOrder);
    };
    let nonces = NoncePair { node_zero, worker_node: nonce()? };
    let proof = prove(secret, HandshakeSide::WorkerNode, &nonces);
    to.send(NodeHandshake::Response { nonce: nonces.worker_node, proof })?;
    let proof = match next(&mut from)? {
        NodeHandshake::Welcome { proof } => proof,
        NodeHandshake::Denied => return Err(HandshakeError::WrongSecret),
        NodeHandshake::Challenge { .. } | NodeHandshake::Response { .. } => {
            return Err(HandshakeError::OutOfOrder);
        }
    };
    if !is_proof(secret, HandshakeSide::NodeZero, &nonces, &proof) {
        return Err(HandshakeError::WrongSecret);
    }
    to.with_message_type().send(purpose)?;
    clear_timeouts(stream)?;
    Ok(())
}

fn next<M: WireMessage>(
    from: &mut FrameReader<DeadlineStream<'_>, M>,
) -> Result<M, HandshakeError> {
    from.receive()?.ok_or(HandshakeError::TimedOut)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::deadlines::BoundedJoin as _;
    use protocol::{PROTOCOL_VERSION, ParallelConfig};
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::thread;

    const TIME: Duration = Duration::from_secs(20);

    fn secret() -> ClusterSecret {
        ClusterSecret::new("0123456789abcdef")
    }

    fn join() -> NodeEvent {
        let (parallel, build) = (ParallelConfig::default(), "0.1.0".to_owned());
        NodeEvent::Join(protocol::NodeInfo { node: 1, nodes: 2, parallel, build, model_digest: 7 })
    }

    fn connected() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (client, listener.accept().unwrap().0)
    }

    /// Runs `admit` with the time limit `time` against a peer that behaves as `peer`; returns the result of
    /// `admit`.
    fn admitted(
        time: Duration,
        peer: impl FnOnce(TcpStream) + Send + 'static,
    ) -> Result<NodeEvent, String> {
        let (client, server) = connected();
        let peer = thread::spawn(move || peer(client));
        let result = admit(&server, &secret(), time).map_err(|error| error.to_string());
        drop(server);
        peer.join_bounded();
        result
    }

    #[test]
    fn nodes_with_the_same_secret_connect() {
        let result = admitted(TIME, |stream| introduce(&stream, &secret(), join(), TIME).unwrap());
        assert_eq!(result.unwrap(), join());
    }

    #[test]
    fn wrong_secret_fails_on_both_sides() {
        let result = admitted(TIME, |stream| {
            let theirs = ClusterSecret::new("0123456789abcdeF");
            let error = introduce(&stream, &theirs, join(), TIME).unwrap_err();
            assert!(matches!(error, HandshakeError::WrongSecret), "{error}");
        });
        assert_eq!(result.unwrap_err(), "the peer does not have the cluster secret");
        // An impostor of node 0 cannot produce a valid welcome.
        let (client, server) = connected();
        let impostor = thread::spawn(move || {
            let mut to = FrameWriter::new(server.try_clone().unwrap(), EPOCH);
            to.send(NodeHandshake::Challenge { nonce: [0; 32] }).unwrap();
            to.send(NodeHandshake::Welcome { proof: [0; 32] }).unwrap();
            server
        });
        let error = introduce(&client, &secret(), join(), TIME).unwrap_err();
        assert!(matches!(error, HandshakeError::WrongSecret), "{error}");
        impostor.join_bounded();
    }

    #[test]
    fn unauthenticated_peers_are_bounded_in_time() {
        let short = Duration::from_millis(200);
        let no_bytes = admitted(short, |mut stream| drop(stream.read_to_end(&mut Vec::new())));
        assert_eq!(no_bytes.unwrap_err(), "the handshake timed out");
        let trickle = admitted(short, |mut stream| {
            // Single bytes do not extend the deadline: the invalid header is complete only after the
            // deadline, so the error is the timeout.
            for byte in b"HDRN".iter().cycle() {
                if stream.write_all(&[*byte]).is_err() {
                    return;
                }
                thread::sleep(Duration::from_millis(50));
            }
        });
        assert_eq!(trickle.unwrap_err(), "the handshake timed out");
    }

    #[test]
    fn frames_of_unauthenticated_peers_are_checked() {
        let error_for = |bytes: Vec<u8>| {
            admitted(TIME, move |mut stream| drop(stream.write_all(&bytes))).unwrap_err()
        };
        let http = error_for(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec());
        assert!(http.starts_with("not a frame"), "{http}");
        assert_eq!(error_for(Vec::new()), "the peer closed the link");
        let header = |version: u16, bytes: u32| {
            let numbers = [&version.to_le_bytes()[..], &34_u16.to_le_bytes(), &[0; 8]].concat();
            [&b"HDRN"[..], &numbers, &bytes.to_le_bytes(), &[0; 4]].concat()
        };
        let long = error_for(header(PROTOCOL_VERSION, 513));
        assert_eq!(long, "a body of 513 bytes exceeds the limit of 512");
        // A message body over the limit causes the same error if its header and the complete body arrive
        // together.
        let whole = error_for([header(PROTOCOL_VERSION, 513), vec![0; 513]].concat());
        assert_eq!(whole, long);
        let old_version = error_for(header(1, 0));
        assert_eq!(
            old_version,
            format!("the peer has protocol version 1, this process has {PROTOCOL_VERSION}")
        );
    }

    #[test]
    fn disconnect_before_welcome_is_not_a_wrong_secret() {
        let (client, server) = connected();
        let ends = thread::spawn(move || {
            FrameWriter::new(&server, EPOCH)
                .send(NodeHandshake::Challenge { nonce: [0; 32] })
                .unwrap();
            let mut from = FrameReader::new(server.try_clone().unwrap(), EPOCH);
            let response: NodeHandshake = from.receive().unwrap().unwrap();
            assert!(matches!(response, NodeHandshake::Response { .. }));
        });
        let error = introduce(&client, &secret(), join(), TIME).unwrap_err();
        assert!(matches!(error, HandshakeError::Link(LinkError::Closed)), "{error}");
        ends.join_bounded();
    }

    #[test]
    fn out_of_order_messages_are_rejected() {
        let result = admitted(TIME, |stream| {
            let mut to = FrameWriter::new(stream, EPOCH);
            to.send(NodeHandshake::Welcome { proof: [0; 32] }).unwrap();
        });
        assert_eq!(result.unwrap_err(), "unexpected message during the handshake");
    }
}
