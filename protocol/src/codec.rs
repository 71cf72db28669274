//! Bodies of frames: MessagePack, decoded straight into the one struct that their kind names.
//!
//! Structs are positional arrays, enum variants go by name, long lists of numbers are packed. Decoding
//! is total: whatever the bytes are, the answer is a value or an error, never a panic and never an
//! allocation larger than what arrived.

use crate::{FromExecutor, FromNode, Handshake, Settings, ToExecutor, ToNode};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Something that travels in frames of its own.
pub trait Message: Sized {
    /// Number of the kind, unique over all messages.
    fn kind(&self) -> u16;

    /// Appends the body to `out`.
    ///
    /// Errors: `CodecError::Encode` if a value has no form on the wire (a path that is not UTF-8).
    fn encode(&self, out: &mut Vec<u8>) -> Result<(), CodecError>;

    /// Reads the body of a frame of this kind; all of it must be used.
    ///
    /// Errors: a kind that is not one of these messages, or a body that is not of its type.
    fn decode(kind: u16, body: &[u8]) -> Result<Self, CodecError>;
}

/// Why a body could not be written or read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CodecError {
    /// The value has no form on the wire.
    #[error("message kind {kind} cannot be encoded: {detail}")]
    Encode {
        /// Kind of the message.
        kind: u16,
        /// What is wrong with it.
        detail: String,
    },
    /// The bytes are not of the kind's type.
    #[error("message kind {kind}, {bytes} bytes, cannot be decoded: {detail}")]
    Decode {
        /// Kind of the message.
        kind: u16,
        /// Length of the body.
        bytes: usize,
        /// What was expected where.
        detail: String,
    },
    /// The value ends before the body does.
    #[error("message kind {kind} has {left} bytes behind its end")]
    Trailing {
        /// Kind of the message.
        kind: u16,
        /// Bytes that belong to nothing.
        left: usize,
    },
    /// A kind that is not sent in this direction.
    #[error("message kind {0} is unknown here")]
    Kind(u16),
}

/// Numbers of the kinds. A number is never used again for another type.
mod kind {
    pub(super) const SETTINGS: u16 = 1;
    pub(super) const SIZE_KV: u16 = 2;
    pub(super) const BATCH: u16 = 3;
    pub(super) const SHUTDOWN: u16 = 4;
    pub(super) const PROFILE: u16 = 5;
    pub(super) const MASK: u16 = 6;
    pub(super) const HELLO: u16 = 17;
    pub(super) const PROGRESS: u16 = 18;
    pub(super) const MEMORY: u16 = 19;
    pub(super) const READY: u16 = 20;
    pub(super) const STEP_OUTPUT: u16 = 21;
    pub(super) const FAULT: u16 = 22;
    pub(super) const BEAT: u16 = 23;
    pub(super) const PROFILED: u16 = 24;
    pub(super) const STEP_DONE: u16 = 25;
    pub(super) const LOADED: u16 = 26;
    pub(super) const CHALLENGE: u16 = 33;
    pub(super) const ANSWER: u16 = 34;
    pub(super) const WELCOME: u16 = 35;
    pub(super) const ACCEPTED: u16 = 36;
    pub(super) const REFUSED: u16 = 37;
    pub(super) const START: u16 = 38;
    pub(super) const LEAVE: u16 = 39;
    pub(super) const NODE_ZERO_BEAT: u16 = 40;
    pub(super) const JOIN: u16 = 41;
    pub(super) const LINK: u16 = 42;
    pub(super) const NOT_STARTED: u16 = 43;
    pub(super) const ENDED: u16 = 44;
    pub(super) const NODE_BEAT: u16 = 45;
    pub(super) const DENIED: u16 = 46;
}

impl Message for Settings {
    fn kind(&self) -> u16 {
        kind::SETTINGS
    }

    fn encode(&self, out: &mut Vec<u8>) -> Result<(), CodecError> {
        put(kind::SETTINGS, self, out)
    }

    fn decode(kind: u16, body: &[u8]) -> Result<Self, CodecError> {
        match kind {
            kind::SETTINGS => take(kind, body),
            other => Err(CodecError::Kind(other)),
        }
    }
}

impl Message for ToExecutor {
    fn kind(&self) -> u16 {
        match self {
            Self::SizeKv { .. } => kind::SIZE_KV,
            Self::Batch(_) => kind::BATCH,
            Self::Mask(_) => kind::MASK,
            Self::Profile { .. } => kind::PROFILE,
            Self::Shutdown => kind::SHUTDOWN,
        }
    }

    fn encode(&self, out: &mut Vec<u8>) -> Result<(), CodecError> {
        let kind = self.kind();
        match self {
            Self::SizeKv { blocks } => put(kind, &(blocks,), out),
            Self::Batch(batch) => put(kind, batch, out),
            Self::Mask(mask) => put(kind, mask, out),
            Self::Profile { on } => put(kind, &(on,), out),
            Self::Shutdown => Ok(()),
        }
    }

    fn decode(kind: u16, body: &[u8]) -> Result<Self, CodecError> {
        match kind {
            kind::SIZE_KV => take(kind, body).map(|(blocks,)| Self::SizeKv { blocks }),
            kind::BATCH => take(kind, body).map(Self::Batch),
            kind::MASK => take(kind, body).map(Self::Mask),
            kind::PROFILE => take(kind, body).map(|(on,)| Self::Profile { on }),
            kind::SHUTDOWN => empty(kind, body, Self::Shutdown),
            other => Err(CodecError::Kind(other)),
        }
    }
}

impl Message for FromExecutor {
    fn kind(&self) -> u16 {
        match self {
            Self::Hello(_) => kind::HELLO,
            Self::Progress { .. } => kind::PROGRESS,
            Self::Loaded(_) => kind::LOADED,
            Self::Memory(_) => kind::MEMORY,
            Self::Ready(_) => kind::READY,
            Self::StepOutput(_) => kind::STEP_OUTPUT,
            Self::StepDone { .. } => kind::STEP_DONE,
            Self::Profiled(_) => kind::PROFILED,
            Self::Fault { .. } => kind::FAULT,
            Self::Beat => kind::BEAT,
        }
    }

    fn encode(&self, out: &mut Vec<u8>) -> Result<(), CodecError> {
        let kind = self.kind();
        match self {
            Self::Hello(hello) => put(kind, hello, out),
            Self::Progress { phase, done, total } => put(kind, &(phase, done, total), out),
            Self::Loaded(digest) => put(kind, digest, out),
            Self::Memory(memory) => put(kind, memory, out),
            Self::Ready(ready) => put(kind, ready, out),
            Self::StepOutput(output) => put(kind, output, out),
            Self::StepDone { step, ns } => put(kind, &(step, ns), out),
            Self::Profiled(profiled) => put(kind, profiled, out),
            Self::Fault { step, text } => put(kind, &(step, text), out),
            Self::Beat => Ok(()),
        }
    }

    fn decode(kind: u16, body: &[u8]) -> Result<Self, CodecError> {
        match kind {
            kind::HELLO => take(kind, body).map(Self::Hello),
            kind::PROGRESS => {
                take(kind, body).map(|(phase, done, total)| Self::Progress { phase, done, total })
            }
            kind::LOADED => take(kind, body).map(Self::Loaded),
            kind::MEMORY => take(kind, body).map(Self::Memory),
            kind::READY => take(kind, body).map(Self::Ready),
            kind::STEP_OUTPUT => take(kind, body).map(Self::StepOutput),
            kind::STEP_DONE => take(kind, body).map(|(step, ns)| Self::StepDone { step, ns }),
            kind::PROFILED => take(kind, body).map(Self::Profiled),
            kind::FAULT => take(kind, body).map(|(step, text)| Self::Fault { step, text }),
            kind::BEAT => empty(kind, body, Self::Beat),
            other => Err(CodecError::Kind(other)),
        }
    }
}

impl Message for Handshake {
    fn kind(&self) -> u16 {
        match self {
            Self::Challenge { .. } => kind::CHALLENGE,
            Self::Answer { .. } => kind::ANSWER,
            Self::Welcome { .. } => kind::WELCOME,
            Self::Denied => kind::DENIED,
        }
    }

    fn encode(&self, out: &mut Vec<u8>) -> Result<(), CodecError> {
        let kind = self.kind();
        match self {
            Self::Challenge { nonce } => put(kind, &(nonce,), out),
            Self::Answer { nonce, proof } => put(kind, &(nonce, proof), out),
            Self::Welcome { proof } => put(kind, &(proof,), out),
            Self::Denied => Ok(()),
        }
    }

    fn decode(kind: u16, body: &[u8]) -> Result<Self, CodecError> {
        match kind {
            kind::CHALLENGE => take(kind, body).map(|(nonce,)| Self::Challenge { nonce }),
            kind::ANSWER => take(kind, body).map(|(nonce, proof)| Self::Answer { nonce, proof }),
            kind::WELCOME => take(kind, body).map(|(proof,)| Self::Welcome { proof }),
            kind::DENIED => empty(kind, body, Self::Denied),
            other => Err(CodecError::Kind(other)),
        }
    }
}

impl Message for ToNode {
    fn kind(&self) -> u16 {
        match self {
            Self::Accepted => kind::ACCEPTED,
            Self::Refused { .. } => kind::REFUSED,
            Self::Start { .. } => kind::START,
            Self::Leave => kind::LEAVE,
            Self::Beat => kind::NODE_ZERO_BEAT,
        }
    }

    fn encode(&self, out: &mut Vec<u8>) -> Result<(), CodecError> {
        let kind = self.kind();
        match self {
            Self::Refused { text } => put(kind, &(text,), out),
            Self::Start { replica, epoch, ticket } => put(kind, &(replica, epoch, ticket), out),
            Self::Accepted | Self::Leave | Self::Beat => Ok(()),
        }
    }

    fn decode(kind: u16, body: &[u8]) -> Result<Self, CodecError> {
        match kind {
            kind::ACCEPTED => empty(kind, body, Self::Accepted),
            kind::REFUSED => take(kind, body).map(|(text,)| Self::Refused { text }),
            kind::START => take(kind, body).map(|(replica, epoch, ticket)| Self::Start {
                replica,
                epoch,
                ticket,
            }),
            kind::LEAVE => empty(kind, body, Self::Leave),
            kind::NODE_ZERO_BEAT => empty(kind, body, Self::Beat),
            other => Err(CodecError::Kind(other)),
        }
    }
}

impl Message for FromNode {
    fn kind(&self) -> u16 {
        match self {
            Self::Join(_) => kind::JOIN,
            Self::Link(_) => kind::LINK,
            Self::NotStarted { .. } => kind::NOT_STARTED,
            Self::Ended { .. } => kind::ENDED,
            Self::Beat => kind::NODE_BEAT,
        }
    }

    fn encode(&self, out: &mut Vec<u8>) -> Result<(), CodecError> {
        let kind = self.kind();
        match self {
            Self::Join(member) => put(kind, member, out),
            Self::Link(offer) => put(kind, offer, out),
            Self::NotStarted { ticket, text } => put(kind, &(ticket, text), out),
            Self::Ended { rank, epoch, text } => put(kind, &(rank, epoch, text), out),
            Self::Beat => Ok(()),
        }
    }

    fn decode(kind: u16, body: &[u8]) -> Result<Self, CodecError> {
        match kind {
            kind::JOIN => take(kind, body).map(Self::Join),
            kind::LINK => take(kind, body).map(Self::Link),
            kind::NOT_STARTED => {
                take(kind, body).map(|(ticket, text)| Self::NotStarted { ticket, text })
            }
            kind::ENDED => {
                take(kind, body).map(|(rank, epoch, text)| Self::Ended { rank, epoch, text })
            }
            kind::NODE_BEAT => empty(kind, body, Self::Beat),
            other => Err(CodecError::Kind(other)),
        }
    }
}

fn put(kind: u16, value: &impl Serialize, out: &mut Vec<u8>) -> Result<(), CodecError> {
    let error = |e: rmp_serde::encode::Error| CodecError::Encode { kind, detail: e.to_string() };
    value.serialize(&mut rmp_serde::Serializer::new(out)).map_err(error)
}

fn take<T: DeserializeOwned>(kind: u16, body: &[u8]) -> Result<T, CodecError> {
    let mut decoder = rmp_serde::Deserializer::new(body);
    let value = T::deserialize(&mut decoder).map_err(|e| CodecError::Decode {
        kind,
        bytes: body.len(),
        detail: e.to_string(),
    })?;
    empty(kind, decoder.get_ref(), value)
}

/// `value`, if nothing is left.
fn empty<T>(kind: u16, rest: &[u8], value: T) -> Result<T, CodecError> {
    match rest.len() {
        0 => Ok(value),
        left => Err(CodecError::Trailing { kind, left }),
    }
}
