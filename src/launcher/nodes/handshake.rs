//! How two nodes come to trust a connection: challenge, answer, welcome, and then what it is for.
//!
//! Whoever connects proves first, so that a stranger learns nothing from node 0. Nothing longer than a few hundred
//! bytes is read from one, and nothing waits for him beyond the deadline.

use super::hurried::{Hurried, free};
use super::proof::{Nonces, Side, is_proof, nonce, prove};
use super::{BODY_BYTES_MAX, EPOCH};
use crate::config::Secret;
use protocol::codec::Message;
use protocol::frame::FrameError;
use protocol::link::{FrameReader, FrameWriter, LinkError, Sending};
use protocol::{FromNode, Handshake};
use std::io;
use std::net::TcpStream;
use std::time::Duration;

/// Longest body of a stranger: an answer has 64 bytes, spelled as numbers.
const STRANGERS_BYTES_MAX: usize = 512;

/// Why a connection did not become one between two nodes.
#[derive(Debug, thiserror::Error)]
pub(super) enum HandshakeError {
    /// The other end does not know the secret.
    #[error("the other end does not know the secret")]
    Secret,
    /// It said something else than what was its turn.
    #[error("the other end does not keep to the handshake")]
    Order,
    /// It was too slow.
    #[error("nothing was said for too long")]
    Late,
    /// It hung up, or speaks no protocol of ours, or another version of it.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// The system failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl HandshakeError {
    /// Whether this was no node at all: scanners and probes are no news.
    pub(super) fn is_of_a_stranger(&self) -> bool {
        let version = matches!(self, Self::Link(LinkError::Frame(FrameError::Version { .. })));
        !version && !matches!(self, Self::Secret)
    }
}

/// Node 0's side: what the other node says of the connection, once it has proved that it knows the secret.
pub(super) fn admit(
    stream: &TcpStream,
    secret: &Secret,
    time: Duration,
) -> Result<FromNode, HandshakeError> {
    let hurried = Hurried::new(stream, time);
    let mut to = FrameWriter::new(hurried.other(), EPOCH);
    let mut from = FrameReader::limited(hurried, EPOCH, STRANGERS_BYTES_MAX);
    let zero = nonce()?;
    to.send(Handshake::Challenge { nonce: zero })?;
    let Handshake::Answer { nonce: other, proof } = next(&mut from)? else {
        return Err(HandshakeError::Order);
    };
    let nonces = Nonces { zero, other };
    if !is_proof(secret, Side::Other, &nonces, &proof) {
        // Told, because a connection that only closes is tried again. It may have closed already.
        let _ = to.send(Handshake::Denied);
        return Err(HandshakeError::Secret);
    }
    to.send(Handshake::Welcome { proof: prove(secret, Side::NodeZero, &nonces) })?;
    let mut from = from.retyped().with_limit(BODY_BYTES_MAX);
    let purpose = next(&mut from)?;
    free(stream)?;
    Ok(purpose)
}

/// The other side: proves to know the secret, sees that node 0 does, and says what the connection is for. What node
/// 0 says next has not been read.
pub(super) fn introduce(
    stream: &TcpStream,
    secret: &Secret,
    purpose: FromNode,
    time: Duration,
) -> Result<(), HandshakeError> {
    let hurried = Hurried::new(stream, time);
    let mut to = FrameWriter::new(hurried.other(), EPOCH);
    let mut from = FrameReader::limited(hurried, EPOCH, STRANGERS_BYTES_MAX);
    let Handshake::Challenge { nonce: zero } = next(&mut from)? else {
        return Err(HandshakeError::Order);
    };
    let nonces = Nonces { zero, other: nonce()? };
    let proof = prove(secret, Side::Other, &nonces);
    to.send(Handshake::Answer { nonce: nonces.other, proof })?;
    let proof = match next(&mut from)? {
        Handshake::Welcome { proof } => proof,
        Handshake::Denied => return Err(HandshakeError::Secret),
        Handshake::Challenge { .. } | Handshake::Answer { .. } => {
            return Err(HandshakeError::Order);
        }
    };
    if !is_proof(secret, Side::NodeZero, &nonces, &proof) {
        return Err(HandshakeError::Secret);
    }
    to.retyped().send(purpose)?;
    free(stream)?;
    Ok(())
}

fn next<M: Message>(from: &mut FrameReader<Hurried<'_>, M>) -> Result<M, HandshakeError> {
    from.receive()?.ok_or(HandshakeError::Late)
}

#[cfg(test)]
mod tests {
    use super::*;
    use protocol::{PROTOCOL_VERSION, Parallel};
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::thread;

    const TIME: Duration = Duration::from_secs(20);

    fn secret() -> Secret {
        Secret::new("0123456789abcdef")
    }

    fn join() -> FromNode {
        let (parallel, build) = (Parallel::default(), "0.1.0".to_owned());
        FromNode::Join(protocol::Member { node: 1, nodes: 2, parallel, build, manifest: 7 })
    }

    fn connected() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (near, listener.accept().unwrap().0)
    }

    /// What node 0 makes of somebody who behaves like this, within `time`.
    fn met(
        time: Duration,
        other: impl FnOnce(TcpStream) + Send + 'static,
    ) -> Result<FromNode, String> {
        let (near, far) = connected();
        let other = thread::spawn(move || other(near));
        let met = admit(&far, &secret(), time).map_err(|error| error.to_string());
        drop(far);
        other.join().unwrap();
        met
    }

    #[test]
    fn those_who_know_the_secret_meet() {
        let met = met(TIME, |stream| introduce(&stream, &secret(), join(), TIME).unwrap());
        assert_eq!(met.unwrap(), join());
    }

    #[test]
    fn another_secret_is_noticed_on_both_sides() {
        let met = met(TIME, |stream| {
            let theirs = Secret::new("0123456789abcdeF");
            let error = introduce(&stream, &theirs, join(), TIME).unwrap_err();
            assert!(matches!(error, HandshakeError::Secret), "{error}");
        });
        assert_eq!(met.unwrap_err(), "the other end does not know the secret");
        // An impostor in node 0's place cannot welcome anybody.
        let (near, far) = connected();
        let impostor = thread::spawn(move || {
            let mut to = FrameWriter::new(far.try_clone().unwrap(), EPOCH);
            to.send(Handshake::Challenge { nonce: [0; 32] }).unwrap();
            to.send(Handshake::Welcome { proof: [0; 32] }).unwrap();
            far
        });
        let error = introduce(&near, &secret(), join(), TIME).unwrap_err();
        assert!(matches!(error, HandshakeError::Secret), "{error}");
        impostor.join().unwrap();
    }

    #[test]
    fn strangers_cost_a_deadline_at_most_and_few_bytes() {
        let short = Duration::from_secs(1);
        let silent = met(short, |mut stream| drop(stream.read_to_end(&mut Vec::new())));
        assert_eq!(silent.unwrap_err(), "nothing was said for too long");
        let trickle = met(short, |mut stream| {
            // A byte at a time begins no new deadline: a whole header, which would be refused, comes too late.
            for byte in b"HDRN".iter().cycle() {
                if stream.write_all(&[*byte]).is_err() {
                    return;
                }
                thread::sleep(Duration::from_millis(200));
            }
        });
        assert_eq!(trickle.unwrap_err(), "nothing was said for too long");
        let says = |bytes: Vec<u8>| {
            met(TIME, move |mut stream| drop(stream.write_all(&bytes))).unwrap_err()
        };
        let http = says(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec());
        assert!(http.starts_with("not a frame"), "{http}");
        assert_eq!(says(Vec::new()), "the peer closed the link");
        let header = |version: u16, bytes: u32| {
            let numbers = [&version.to_le_bytes()[..], &34_u16.to_le_bytes(), &[0; 8]].concat();
            [&b"HDRN"[..], &numbers, &bytes.to_le_bytes(), &[0; 4]].concat()
        };
        let long = says(header(PROTOCOL_VERSION, 513));
        assert_eq!(long, "a body of 513 bytes, at most 512");
        // Whole, it arrives in one read.
        let whole = says([header(PROTOCOL_VERSION, 513), vec![0; 513]].concat());
        assert_eq!(whole, long);
        let former = says(header(1, 0));
        assert_eq!(former, format!("the peer speaks protocol 1, this process {PROTOCOL_VERSION}"));
    }

    #[test]
    fn an_end_before_the_welcome_is_no_word_about_the_secret() {
        let (near, far) = connected();
        let ends = thread::spawn(move || {
            FrameWriter::new(&far, EPOCH).send(Handshake::Challenge { nonce: [0; 32] }).unwrap();
            let mut from = FrameReader::new(far.try_clone().unwrap(), EPOCH);
            let answer: Handshake = from.receive().unwrap().unwrap();
            assert!(matches!(answer, Handshake::Answer { .. }));
        });
        let error = introduce(&near, &secret(), join(), TIME).unwrap_err();
        assert!(matches!(error, HandshakeError::Link(LinkError::Closed)), "{error}");
        ends.join().unwrap();
    }

    #[test]
    fn only_what_is_its_turn_counts() {
        let met = met(TIME, |stream| {
            let mut to = FrameWriter::new(stream, EPOCH);
            to.send(Handshake::Welcome { proof: [0; 32] }).unwrap();
        });
        assert_eq!(met.unwrap_err(), "the other end does not keep to the handshake");
    }
}
