//! First bytes of a ZMTP connection, and the socket types that the ends announce.

use super::super::frame::put_command;

/// Greeting of ZMTP 3.1 with mechanism NULL: signature, version, mechanism, as-server flag, filler.
pub(super) const GREETING: [u8; 64] = {
    let mut greeting = [0; 64];
    (greeting[0], greeting[9], greeting[10], greeting[11]) = (0xff, 0x7f, 3, 1);
    let [n, u, l, ..] = *b"NULL";
    (greeting[12], greeting[13], greeting[14], greeting[15]) = (n, u, l, l);
    greeting
};
/// Position of the mechanism in a greeting.
pub(super) const MECHANISM: std::ops::Range<usize> = 12..32;
pub(super) const VERSION_AT: usize = 10;

/// Type of the publisher's socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ZmtpSocketType {
    /// PUB socket, which sends batches to subscribers.
    Publish,
    /// ROUTER socket, which responds to replay requests.
    Router,
}

impl ZmtpSocketType {
    /// Returns the name of the socket type in ZeroMQ.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Publish => "PUB",
            Self::Router => "ROUTER",
        }
    }

    /// Appends the READY command of a socket of this type.
    pub(super) fn ready(self, out: &mut Vec<u8>) {
        let data: &[u8] = match self {
            Self::Publish => b"\x0bSocket-Type\0\0\0\x03PUB",
            Self::Router => b"\x0bSocket-Type\0\0\0\x06ROUTER\x08Identity\0\0\0\0",
        };
        put_command(b"READY", data, out);
    }

    /// Whether a peer with the socket type `peer` can connect to a socket of this type.
    pub(super) fn accepts(self, peer: &[u8]) -> bool {
        match self {
            Self::Publish => matches!(peer, b"SUB" | b"XSUB"),
            Self::Router => matches!(peer, b"REQ" | b"DEALER" | b"ROUTER"),
        }
    }
}

/// Returns the value of the property `Socket-Type` in a READY command.
pub(super) fn socket_type(mut properties: &[u8]) -> Option<&[u8]> {
    while let Some((&name_len, rest)) = properties.split_first() {
        let (name, rest) = rest.split_at_checked(usize::from(name_len))?;
        let (value_len, rest) = rest.split_first_chunk::<4>()?;
        let (value, rest) = rest.split_at_checked(u32::from_be_bytes(*value_len) as usize)?;
        if name.eq_ignore_ascii_case(b"Socket-Type") {
            return Some(value);
        }
        properties = rest;
    }
    None
}
