//! Messages between the server and the worker process that renders a chat template sent in a request.

use super::super::error::TextError;
use grammar::worker_process::{decode_message, encode_message};
use protocol::codec::{CodecError, WireMessage};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Message kinds in the frame headers; the connections to executors and grammar workers use other numbers.
const TEMPLATE_REQUEST: u16 = 67;
const TEMPLATE_REPLY: u16 = 68;

/// Request to the worker process: one template to render.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct TemplateRenderRequest {
    /// Source of the template.
    pub(super) template: String,
    /// Variables of the template.
    pub(super) variables: Map<String, Value>,
    /// Arguments of the tool calls, converted to the other form: JSON text to an object, an object to JSON
    /// text.
    pub(super) other_arguments: Vec<Value>,
    /// Maximum size of the output in bytes.
    pub(super) output_bytes_max: usize,
    /// Limit of the worker process's address space in bytes.
    pub(super) memory_bytes: u64,
}

/// Reply of the worker process: the rendered text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct TemplateRenderReply(pub(super) Result<String, TextError>);

impl WireMessage for TemplateRenderRequest {
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

impl WireMessage for TemplateRenderReply {
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
