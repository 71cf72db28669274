//! Proof that a node has the cluster secret: HMAC-SHA-256 (RFC 2104) over the nonces of both sides.

use super::cluster::ClusterSecret;
use hmac::{Hmac, KeyInit, Mac};
use protocol::{HandshakeNonce, HandshakeProof};
use rustix::rand::{GetRandomFlags, getrandom};
use sha2::Sha256;
use std::io;

/// Side of the handshake that creates a proof. The proof of one side is not valid for the other side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HandshakeSide {
    /// Node 0, which accepts the connection.
    NodeZero,
    /// Worker node, which opens the connection.
    WorkerNode,
}

/// Nonces that both sides of a connection have sent.
#[derive(Debug, Clone, Copy)]
pub(super) struct NoncePair {
    /// Nonce of node 0.
    pub(super) node_zero: HandshakeNonce,
    /// Nonce of the worker node.
    pub(super) worker_node: HandshakeNonce,
}

/// Returns an unpredictable nonce.
///
/// Errors: the operating system provides no random bytes.
pub(super) fn nonce() -> io::Result<HandshakeNonce> {
    let mut nonce = [0; 32];
    let mut filled = 0;
    while filled < nonce.len() {
        filled += getrandom(&mut nonce[filled..], GetRandomFlags::empty())?;
    }
    Ok(nonce)
}

/// Computes the proof of one side of the handshake.
pub(super) fn prove(
    secret: &ClusterSecret,
    side: HandshakeSide,
    nonces: &NoncePair,
) -> HandshakeProof {
    digest(secret, side, nonces).finalize().into_bytes().into()
}

/// Whether `proof` is the proof of `side`; compared in constant time.
pub(super) fn is_proof(
    secret: &ClusterSecret,
    side: HandshakeSide,
    nonces: &NoncePair,
    proof: &HandshakeProof,
) -> bool {
    digest(secret, side, nonces).verify_slice(proof).is_ok()
}

fn digest(secret: &ClusterSecret, side: HandshakeSide, nonces: &NoncePair) -> Hmac<Sha256> {
    #[allow(clippy::expect_used, reason = "HMAC takes keys of any length")]
    let mut digest =
        Hmac::<Sha256>::new_from_slice(secret.bytes()).expect("HMAC accepts a key of any length");
    digest.update(match side {
        HandshakeSide::NodeZero => b"hadron cluster: node 0\0",
        HandshakeSide::WorkerNode => b"hadron cluster: other node\0",
    });
    digest.update(&nonces.node_zero);
    digest.update(&nonces.worker_node);
    digest
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected HMAC, computed in Python: `hmac.new(b"0123456789abcdef", label + b"\1" * 32 + b"\2" * 32,
    /// "sha256").hexdigest()`.
    const REFERENCE_HMAC: &str = "10943c7decfa8d757b478656263cf7bab2a4d0298e15040bd7d522315c078010";

    #[test]
    fn proof_matches_the_reference_hmac() {
        let secret = ClusterSecret::new("0123456789abcdef");
        let nonces = NoncePair { node_zero: [1; 32], worker_node: [2; 32] };
        let proof = prove(&secret, HandshakeSide::NodeZero, &nonces);
        let byte = |at: usize| u8::from_str_radix(&REFERENCE_HMAC[at..at + 2], 16).unwrap();
        let expected: Vec<u8> = (0..REFERENCE_HMAC.len()).step_by(2).map(byte).collect();
        assert_eq!(proof[..], expected);
    }

    #[test]
    fn proof_binds_secret_side_and_nonces() {
        let secret = ClusterSecret::new("0123456789abcdef");
        let nonces = NoncePair { node_zero: nonce().unwrap(), worker_node: nonce().unwrap() };
        assert_ne!(nonces.node_zero, nonces.worker_node);
        let proof = prove(&secret, HandshakeSide::WorkerNode, &nonces);
        assert!(is_proof(&secret, HandshakeSide::WorkerNode, &nonces, &proof));
        assert!(!is_proof(&secret, HandshakeSide::NodeZero, &nonces, &proof), "reflected proof");
        assert!(!is_proof(
            &ClusterSecret::new("0123456789abcdeF"),
            HandshakeSide::WorkerNode,
            &nonces,
            &proof
        ));
        let later = NoncePair { node_zero: [0; 32], ..nonces };
        assert!(!is_proof(&secret, HandshakeSide::WorkerNode, &later, &proof), "replayed proof");
        let swapped = NoncePair { node_zero: nonces.worker_node, worker_node: nonces.node_zero };
        assert!(!is_proof(&secret, HandshakeSide::WorkerNode, &swapped, &proof));
    }
}
