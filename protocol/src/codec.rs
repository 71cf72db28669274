//! Frame bodies: MessagePack, decoded directly into the struct that the message kind names.
//!
//! Structs are positional arrays, enum variants are encoded by name, long lists of numbers are packed.
//! Decoding is total: any input yields a value or an error, never a panic and never an allocation larger than
//! the input.

use crate::{
    ExecutorCommand, ExecutorEvent, ExecutorSettings, NodeCommand, NodeEvent, NodeHandshake,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// A type of messages that are sent as bodies of frames.
pub trait WireMessage: Sized {
    /// Returns the message kind, unique over all messages.
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

impl WireMessage for ExecutorSettings {
    fn kind(&self) -> u16 {
        kind::SETTINGS
    }

    fn encode(&self, out: &mut Vec<u8>) -> Result<(), CodecError> {
        encode_body(kind::SETTINGS, self, out)
    }

    fn decode(kind: u16, body: &[u8]) -> Result<Self, CodecError> {
        match kind {
            kind::SETTINGS => decode_body(kind, body),
            other => Err(CodecError::UnknownKind(other)),
        }
    }
}

impl WireMessage for ExecutorCommand {
    fn kind(&self) -> u16 {
        match self {
            Self::AllocateKv { .. } => kind::ALLOCATE_KV,
            Self::Batch(_) => kind::BATCH,
            Self::Bitmask(_) => kind::GRAMMAR_BITMASK,
            Self::Profile { .. } => kind::PROFILE,
            Self::Shutdown => kind::SHUTDOWN,
        }
    }

    fn encode(&self, out: &mut Vec<u8>) -> Result<(), CodecError> {
        let kind = self.kind();
        match self {
            Self::AllocateKv { blocks } => encode_body(kind, &(blocks,), out),
            Self::Batch(batch) => encode_body(kind, batch, out),
            Self::Bitmask(mask) => encode_body(kind, mask, out),
            Self::Profile { enabled } => encode_body(kind, &(enabled,), out),
            Self::Shutdown => Ok(()),
        }
    }

    fn decode(kind: u16, body: &[u8]) -> Result<Self, CodecError> {
        match kind {
            kind::ALLOCATE_KV => {
                decode_body(kind, body).map(|(blocks,)| Self::AllocateKv { blocks })
            }
            kind::BATCH => decode_body(kind, body).map(Self::Batch),
            kind::GRAMMAR_BITMASK => decode_body(kind, body).map(Self::Bitmask),
            kind::PROFILE => decode_body(kind, body).map(|(enabled,)| Self::Profile { enabled }),
            kind::SHUTDOWN => expect_end(kind, body, Self::Shutdown),
            other => Err(CodecError::UnknownKind(other)),
        }
    }
}

impl WireMessage for ExecutorEvent {
    fn kind(&self) -> u16 {
        match self {
            Self::Hello(_) => kind::HELLO,
            Self::Progress { .. } => kind::PROGRESS,
            Self::WeightsLoaded(_) => kind::WEIGHTS_LOADED,
            Self::WarmUpDone(_) => kind::WARM_UP_DONE,
            Self::Ready(_) => kind::READY,
            Self::StepOutput(_) => kind::STEP_OUTPUT,
            Self::StepDone { .. } => kind::STEP_DONE,
            Self::ProfilerStatus(_) => kind::PROFILER_STATUS,
            Self::Fault { .. } => kind::FAULT,
            Self::Heartbeat => kind::HEARTBEAT,
        }
    }

    fn encode(&self, out: &mut Vec<u8>) -> Result<(), CodecError> {
        let kind = self.kind();
        match self {
            Self::Hello(hello) => encode_body(kind, hello, out),
            Self::Progress { phase, done, total } => encode_body(kind, &(phase, done, total), out),
            Self::WeightsLoaded(digest) => encode_body(kind, digest, out),
            Self::WarmUpDone(report) => encode_body(kind, report, out),
            Self::Ready(ready) => encode_body(kind, ready, out),
            Self::StepOutput(output) => encode_body(kind, output, out),
            Self::StepDone { step, duration_ns } => encode_body(kind, &(step, duration_ns), out),
            Self::ProfilerStatus(status) => encode_body(kind, status, out),
            Self::Fault { step, text } => encode_body(kind, &(step, text), out),
            Self::Heartbeat => Ok(()),
        }
    }

    fn decode(kind: u16, body: &[u8]) -> Result<Self, CodecError> {
        match kind {
            kind::HELLO => decode_body(kind, body).map(Self::Hello),
            kind::PROGRESS => decode_body(kind, body).map(|(phase, done, total)| Self::Progress {
                phase,
                done,
                total,
            }),
            kind::WEIGHTS_LOADED => decode_body(kind, body).map(Self::WeightsLoaded),
            kind::WARM_UP_DONE => decode_body(kind, body).map(Self::WarmUpDone),
            kind::READY => decode_body(kind, body).map(Self::Ready),
            kind::STEP_OUTPUT => decode_body(kind, body).map(Self::StepOutput),
            kind::STEP_DONE => decode_body(kind, body)
                .map(|(step, duration_ns)| Self::StepDone { step, duration_ns }),
            kind::PROFILER_STATUS => decode_body(kind, body).map(Self::ProfilerStatus),
            kind::FAULT => decode_body(kind, body).map(|(step, text)| Self::Fault { step, text }),
            kind::HEARTBEAT => expect_end(kind, body, Self::Heartbeat),
            other => Err(CodecError::UnknownKind(other)),
        }
    }
}

impl WireMessage for NodeHandshake {
    fn kind(&self) -> u16 {
        match self {
            Self::Challenge { .. } => kind::CHALLENGE,
            Self::Response { .. } => kind::RESPONSE,
            Self::Welcome { .. } => kind::WELCOME,
            Self::Denied => kind::DENIED,
        }
    }

    fn encode(&self, out: &mut Vec<u8>) -> Result<(), CodecError> {
        let kind = self.kind();
        match self {
            Self::Challenge { nonce } => encode_body(kind, &(nonce,), out),
            Self::Response { nonce, proof } => encode_body(kind, &(nonce, proof), out),
            Self::Welcome { proof } => encode_body(kind, &(proof,), out),
            Self::Denied => Ok(()),
        }
    }

    fn decode(kind: u16, body: &[u8]) -> Result<Self, CodecError> {
        match kind {
            kind::CHALLENGE => decode_body(kind, body).map(|(nonce,)| Self::Challenge { nonce }),
            kind::RESPONSE => {
                decode_body(kind, body).map(|(nonce, proof)| Self::Response { nonce, proof })
            }
            kind::WELCOME => decode_body(kind, body).map(|(proof,)| Self::Welcome { proof }),
            kind::DENIED => expect_end(kind, body, Self::Denied),
            other => Err(CodecError::UnknownKind(other)),
        }
    }
}

impl WireMessage for NodeCommand {
    fn kind(&self) -> u16 {
        match self {
            Self::Accepted => kind::ACCEPTED,
            Self::Rejected { .. } => kind::REJECTED,
            Self::Start { .. } => kind::START,
            Self::Leave => kind::LEAVE,
            Self::Heartbeat => kind::NODE_ZERO_HEARTBEAT,
        }
    }

    fn encode(&self, out: &mut Vec<u8>) -> Result<(), CodecError> {
        let kind = self.kind();
        match self {
            Self::Rejected { reason } => encode_body(kind, &(reason,), out),
            Self::Start { replica, epoch, ticket } => {
                encode_body(kind, &(replica, epoch, ticket), out)
            }
            Self::Accepted | Self::Leave | Self::Heartbeat => Ok(()),
        }
    }

    fn decode(kind: u16, body: &[u8]) -> Result<Self, CodecError> {
        match kind {
            kind::ACCEPTED => expect_end(kind, body, Self::Accepted),
            kind::REJECTED => decode_body(kind, body).map(|(reason,)| Self::Rejected { reason }),
            kind::START => decode_body(kind, body).map(|(replica, epoch, ticket)| Self::Start {
                replica,
                epoch,
                ticket,
            }),
            kind::LEAVE => expect_end(kind, body, Self::Leave),
            kind::NODE_ZERO_HEARTBEAT => expect_end(kind, body, Self::Heartbeat),
            other => Err(CodecError::UnknownKind(other)),
        }
    }
}

impl WireMessage for NodeEvent {
    fn kind(&self) -> u16 {
        match self {
            Self::Join(_) => kind::JOIN,
            Self::Link(_) => kind::LINK,
            Self::StartFailed { .. } => kind::START_FAILED,
            Self::ExecutorExited { .. } => kind::EXECUTOR_EXITED,
            Self::Heartbeat => kind::NODE_HEARTBEAT,
        }
    }

    fn encode(&self, out: &mut Vec<u8>) -> Result<(), CodecError> {
        let kind = self.kind();
        match self {
            Self::Join(node_info) => encode_body(kind, node_info, out),
            Self::Link(offer) => encode_body(kind, offer, out),
            Self::StartFailed { ticket, reason } => encode_body(kind, &(ticket, reason), out),
            Self::ExecutorExited { rank, epoch, description } => {
                encode_body(kind, &(rank, epoch, description), out)
            }
            Self::Heartbeat => Ok(()),
        }
    }

    fn decode(kind: u16, body: &[u8]) -> Result<Self, CodecError> {
        match kind {
            kind::JOIN => decode_body(kind, body).map(Self::Join),
            kind::LINK => decode_body(kind, body).map(Self::Link),
            kind::START_FAILED => {
                decode_body(kind, body).map(|(ticket, reason)| Self::StartFailed { ticket, reason })
            }
            kind::EXECUTOR_EXITED => decode_body(kind, body).map(|(rank, epoch, description)| {
                Self::ExecutorExited { rank, epoch, description }
            }),
            kind::NODE_HEARTBEAT => expect_end(kind, body, Self::Heartbeat),
            other => Err(CodecError::UnknownKind(other)),
        }
    }
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
