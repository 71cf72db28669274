//! Messages between a server and its worker processes: MessagePack in the frame format of executor links.

use protocol::Epoch;
use protocol::codec::CodecError;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Value of the epoch field in all frames. It is constant, because each worker process has its own
/// connection, so frames of an earlier process cannot arrive.
pub const EPOCH: Epoch = Epoch(1);

/// Appends a message body, which is `value` encoded as MessagePack, to `out`.
///
/// Errors: the value cannot be represented in MessagePack.
pub fn encode_message(
    kind: u16,
    value: &impl Serialize,
    out: &mut Vec<u8>,
) -> Result<(), CodecError> {
    let error = |e: rmp_serde::encode::Error| CodecError::Encode { kind, detail: e.to_string() };
    rmp_serde::encode::write(out, value).map_err(error)
}

/// Decodes a message body; `expected` is the required message kind.
///
/// Errors: the message has another kind, or its body is invalid.
pub fn decode_message<T: DeserializeOwned>(
    expected: u16,
    kind: u16,
    body: &[u8],
) -> Result<T, CodecError> {
    if kind != expected {
        return Err(CodecError::UnknownKind(kind));
    }
    rmp_serde::from_slice(body).map_err(|e| CodecError::Decode {
        kind,
        bytes: body.len(),
        detail: e.to_string(),
    })
}
