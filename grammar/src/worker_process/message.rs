//! Messages between a server and its worker processes: MessagePack in the frames of executors.

use protocol::Epoch;
use protocol::codec::CodecError;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// A worker process that is lost takes its link with it: there is one generation.
pub const EPOCH: Epoch = Epoch(1);

/// Appends the body of a message of a kind.
///
/// Errors: a value that has no form in MessagePack.
pub fn encode_message(
    kind: u16,
    value: &impl Serialize,
    out: &mut Vec<u8>,
) -> Result<(), CodecError> {
    let error = |e: rmp_serde::encode::Error| CodecError::Encode { kind, detail: e.to_string() };
    rmp_serde::encode::write(out, value).map_err(error)
}

/// The body of a message, which must be of the kind `wanted`.
///
/// Errors: another kind, or a body that is no such message.
pub fn decode_message<T: DeserializeOwned>(
    wanted: u16,
    kind: u16,
    body: &[u8],
) -> Result<T, CodecError> {
    if kind != wanted {
        return Err(CodecError::UnknownKind(kind));
    }
    rmp_serde::from_slice(body).map_err(|e| CodecError::Decode {
        kind,
        bytes: body.len(),
        detail: e.to_string(),
    })
}
