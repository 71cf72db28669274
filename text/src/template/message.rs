//! Messages between a server and the worker process that renders the template of one request.

use super::super::error::TextError;
use grammar::worker_process::{decode_message, encode_message};
use protocol::codec::{CodecError, WireMessage};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Kinds of messages, distinct from those of executors and of grammars.
const TEMPLATE_REQUEST: u16 = 67;
const TEMPLATE_REPLY: u16 = 68;

/// A template to render, once.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct TemplateRequest {
    /// The template.
    pub(super) template: String,
    /// Its variables.
    pub(super) variables: Map<String, Value>,
    /// Bytes that it may write.
    pub(super) output_bytes_max: usize,
    /// Bytes of address space for it.
    pub(super) memory_bytes: u64,
}

/// What it wrote.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct TemplateReply(pub(super) Result<String, TextError>);

impl WireMessage for TemplateRequest {
    fn kind(&self) -> u16 {
        TEMPLATE_REQUEST
    }

    fn encode(&self, out: &mut Vec<u8>) -> Result<(), CodecError> {
        encode_message(TEMPLATE_REQUEST, self, out)
    }

    fn decode(kind: u16, body: &[u8]) -> Result<Self, CodecError> {
        decode_message(TEMPLATE_REQUEST, kind, body)
    }
}

impl WireMessage for TemplateReply {
    fn kind(&self) -> u16 {
        TEMPLATE_REPLY
    }

    fn encode(&self, out: &mut Vec<u8>) -> Result<(), CodecError> {
        encode_message(TEMPLATE_REPLY, self, out)
    }

    fn decode(kind: u16, body: &[u8]) -> Result<Self, CodecError> {
        decode_message(TEMPLATE_REPLY, kind, body)
    }
}
