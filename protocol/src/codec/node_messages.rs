//! Bodies of the messages between node 0 and the other nodes.

use super::{CodecError, WireMessage, decode_body, encode_body, expect_end, kind};
use crate::{NodeCommand, NodeEvent, NodeHandshake};

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
            Self::Start { first_rank, count, epoch, ticket } => {
                encode_body(kind, &(first_rank, count, epoch, ticket), out)
            }
            Self::Accepted | Self::Leave | Self::Heartbeat => Ok(()),
        }
    }

    fn decode(kind: u16, body: &[u8]) -> Result<Self, CodecError> {
        match kind {
            kind::ACCEPTED => expect_end(kind, body, Self::Accepted),
            kind::REJECTED => decode_body(kind, body).map(|(reason,)| Self::Rejected { reason }),
            kind::START => decode_body(kind, body).map(|(first_rank, count, epoch, ticket)| {
                Self::Start { first_rank, count, epoch, ticket }
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
