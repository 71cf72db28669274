//! Proofs that one knows the cluster's secret: HMAC-SHA-256 (RFC 2104) over fresh numbers of both sides.

use crate::config::Secret;
use hmac::{Hmac, KeyInit, Mac};
use protocol::{Nonce, Proof};
use rustix::rand::{GetRandomFlags, getrandom};
use sha2::Sha256;
use std::io;

/// Whose proof it is: what one side says is no proof of the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    /// The one that is connected to.
    NodeZero,
    /// The one that connects.
    Other,
}

/// The numbers of one connection.
#[derive(Debug, Clone, Copy)]
pub(super) struct Nonces {
    /// Of node 0.
    pub(super) zero: Nonce,
    /// Of the other node.
    pub(super) other: Nonce,
}

/// A number that nobody can foresee.
///
/// Errors: the system has none.
pub(super) fn nonce() -> io::Result<Nonce> {
    let mut nonce = [0; 32];
    let mut filled = 0;
    while filled < nonce.len() {
        filled += getrandom(&mut nonce[filled..], GetRandomFlags::empty())?;
    }
    Ok(nonce)
}

/// The proof of one side.
pub(super) fn prove(secret: &Secret, side: Side, nonces: &Nonces) -> Proof {
    digest(secret, side, nonces).finalize().into_bytes().into()
}

/// Whether this is the proof of that side; how long it takes tells nothing.
pub(super) fn is_proof(secret: &Secret, side: Side, nonces: &Nonces, proof: &Proof) -> bool {
    digest(secret, side, nonces).verify_slice(proof).is_ok()
}

fn digest(secret: &Secret, side: Side, nonces: &Nonces) -> Hmac<Sha256> {
    #[allow(clippy::expect_used, reason = "HMAC takes keys of any length")]
    let mut digest = Hmac::<Sha256>::new_from_slice(secret.bytes()).expect("any key will do");
    digest.update(match side {
        Side::NodeZero => b"hadron cluster: node 0\0",
        Side::Other => b"hadron cluster: other node\0",
    });
    digest.update(&nonces.zero);
    digest.update(&nonces.other);
    digest
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Computed with Python: `hmac.new(b"0123456789abcdef", label + b"\1" * 32 + b"\2" * 32, "sha256").hexdigest()`.
    const KNOWN: &str = "10943c7decfa8d757b478656263cf7bab2a4d0298e15040bd7d522315c078010";

    #[test]
    fn it_is_the_hmac_that_others_compute_too() {
        let secret = Secret::new("0123456789abcdef");
        let nonces = Nonces { zero: [1; 32], other: [2; 32] };
        let proof = prove(&secret, Side::NodeZero, &nonces);
        let byte = |at: usize| u8::from_str_radix(&KNOWN[at..at + 2], 16).unwrap();
        let known: Vec<u8> = (0..KNOWN.len()).step_by(2).map(byte).collect();
        assert_eq!(proof[..], known);
    }

    #[test]
    fn it_is_of_one_secret_one_side_and_these_numbers() {
        let secret = Secret::new("0123456789abcdef");
        let nonces = Nonces { zero: nonce().unwrap(), other: nonce().unwrap() };
        assert_ne!(nonces.zero, nonces.other);
        let proof = prove(&secret, Side::Other, &nonces);
        assert!(is_proof(&secret, Side::Other, &nonces, &proof));
        assert!(!is_proof(&secret, Side::NodeZero, &nonces, &proof), "thrown back");
        assert!(!is_proof(&Secret::new("0123456789abcdeF"), Side::Other, &nonces, &proof));
        let later = Nonces { zero: [0; 32], ..nonces };
        assert!(!is_proof(&secret, Side::Other, &later, &proof), "said again");
        let swapped = Nonces { zero: nonces.other, other: nonces.zero };
        assert!(!is_proof(&secret, Side::Other, &swapped, &proof));
    }
}
