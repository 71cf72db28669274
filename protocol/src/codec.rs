//! Frame bodies: MessagePack, decoded directly into the struct that the message kind names.
//!
//! Structs are positional arrays, enum variants are encoded by name, long lists of numbers are packed.
//! Decoding is total: any input yields a value or an error, never a panic and never an allocation larger than
//! the input.

mod executor_messages;
mod node_messages;

use serde::Serialize;
use serde::de::DeserializeOwned;

/// A type of messages that are encoded as bodies of frames, for example `ExecutorCommand`.
pub trait WireMessage: Sized {
    /// Returns the message kind, a number that is unique over all message types.
    fn kind(&self) -> u16;

    /// Appends the encoded body to `out`.
    ///
    /// Errors: `CodecError::Encode` if a value cannot be encoded (a path that is not UTF-8).
    fn encode(&self, out: &mut Vec<u8>) -> Result<(), CodecError>;

    /// Decodes the body of a frame with message kind `kind`; the body must be consumed completely.
    ///
    /// Errors: `kind` is not a kind of this message type, or the body does not encode the type of `kind`.
    fn decode(kind: u16, body: &[u8]) -> Result<Self, CodecError>;
}

/// Error of encoding or decoding a body.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CodecError {
    /// The value cannot be encoded.
    #[error("message kind {kind} cannot be encoded: {detail}")]
    Encode {
        /// Message kind.
        kind: u16,
        /// Error detail.
        detail: String,
    },
    /// The bytes do not encode a value of the kind's type.
    #[error("message kind {kind}, {bytes} bytes, cannot be decoded: {detail}")]
    Decode {
        /// Message kind.
        kind: u16,
        /// Length of the body in bytes.
        bytes: usize,
        /// Error detail with the expected type.
        detail: String,
    },
    /// The body is longer than the value.
    #[error("message kind {kind} has {left} trailing bytes")]
    Trailing {
        /// Message kind.
        kind: u16,
        /// Number of trailing bytes.
        left: usize,
    },
    /// The message kind is not sent in this direction.
    #[error("message kind {0} is not valid in this direction")]
    UnknownKind(u16),
}

/// Message kinds. A number is never reused for another type.
mod kind {
    pub(super) const SETTINGS: u16 = 1;
    pub(super) const ALLOCATE_KV: u16 = 2;
    pub(super) const BATCH: u16 = 3;
    pub(super) const SHUTDOWN: u16 = 4;
    pub(super) const PROFILE: u16 = 5;
    pub(super) const GRAMMAR_BITMASK: u16 = 6;
    pub(super) const ENDPOINTS: u16 = 7;
    pub(super) const HELLO: u16 = 17;
    pub(super) const PROGRESS: u16 = 18;
    pub(super) const WARM_UP_DONE: u16 = 19;
    pub(super) const READY: u16 = 20;
    pub(super) const STEP_OUTPUT: u16 = 21;
    pub(super) const FAULT: u16 = 22;
    pub(super) const HEARTBEAT: u16 = 23;
    pub(super) const PROFILER_STATUS: u16 = 24;
    pub(super) const STEP_DONE: u16 = 25;
    pub(super) const WEIGHTS_LOADED: u16 = 26;
    pub(super) const DRAFTS: u16 = 27;
    pub(super) const ENDPOINT: u16 = 28;
    pub(super) const CHALLENGE: u16 = 33;
    pub(super) const RESPONSE: u16 = 34;
    pub(super) const WELCOME: u16 = 35;
    pub(super) const ACCEPTED: u16 = 36;
    pub(super) const REJECTED: u16 = 37;
    pub(super) const START: u16 = 38;
    pub(super) const LEAVE: u16 = 39;
    pub(super) const NODE_ZERO_HEARTBEAT: u16 = 40;
    pub(super) const JOIN: u16 = 41;
    pub(super) const LINK: u16 = 42;
    pub(super) const START_FAILED: u16 = 43;
    pub(super) const EXECUTOR_EXITED: u16 = 44;
    pub(super) const NODE_HEARTBEAT: u16 = 45;
    pub(super) const DENIED: u16 = 46;
}

fn encode_body(kind: u16, value: &impl Serialize, out: &mut Vec<u8>) -> Result<(), CodecError> {
    let error = |e: rmp_serde::encode::Error| CodecError::Encode { kind, detail: e.to_string() };
    value.serialize(&mut rmp_serde::Serializer::new(out)).map_err(error)
}

fn decode_body<T: DeserializeOwned>(kind: u16, body: &[u8]) -> Result<T, CodecError> {
    let mut decoder = rmp_serde::Deserializer::new(body);
    let value = T::deserialize(&mut decoder).map_err(|e| CodecError::Decode {
        kind,
        bytes: body.len(),
        detail: e.to_string(),
    })?;
    expect_end(kind, decoder.get_ref(), value)
}

/// Returns `value` if no bytes of the body are left.
fn expect_end<T>(kind: u16, rest: &[u8], value: T) -> Result<T, CodecError> {
    match rest.len() {
        0 => Ok(value),
        left => Err(CodecError::Trailing { kind, left }),
    }
}
