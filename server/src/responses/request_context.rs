//! Parses the context of a Responses request: instructions, the earlier response or conversation that it
//! continues, and the input.

use super::convert::InputItemConverter;
use super::stored_context::StoredContextReader;
use crate::api_error::ApiError;
use crate::conversations::check_size;
use crate::request_fields::{RequestFields, wrong_type};
use crate::strict_json::JsonValue;
use serde_json::{Map, Value, json};

/// Context of one response: instructions, earlier conversation and input.
pub(super) struct ResponsesRequestContext {
    pub(super) instructions: Option<String>,
    /// Id of the response that the request continues.
    pub(super) previous: Option<String>,
    /// Id of the conversation that the response continues and extends.
    pub(super) conversation: Option<String>,
    /// Input items of the request; empty if they are not stored.
    pub(super) input: Vec<Value>,
    /// Conversation including the input but not the instructions, as chat template messages.
    pub(super) history: Vec<Value>,
}

impl ResponsesRequestContext {
    /// Parses the context of a request, and adds its fields to the response object. `stored` reads the
    /// stored objects that the request continues or refers to; `stores_input`: whether the input is stored
    /// with the response.
    ///
    /// Errors: HTTP status 400 with the name of the invalid field; 404 for an object that is not stored.
    pub(super) fn take(
        fields: &mut RequestFields,
        stored: &mut StoredContextReader<'_>,
        stores_input: bool,
        echoed_fields: &mut Map<String, Value>,
    ) -> Result<Self, ApiError> {
        let previous = fields.string("previous_response_id", 256)?;
        let instructions = fields.string("instructions", usize::MAX)?;
        let conversation = conversation_id(fields)?;
        if previous.is_some() && conversation.is_some() {
            let message = "cannot be combined with previous_response_id";
            return Err(ApiError::invalid("conversation", message));
        }
        let mut history = match &previous {
            None => Vec::new(),
            Some(id) => stored.history(id, "previous_response_id")?,
        };
        let input = fields.take("input");
        let mut converter = InputItemConverter::new(&mut history, stored, fields.hints());
        let bytes = match &conversation {
            None => 0,
            Some(id) => converter.conversation(id)?,
        };
        if stores_input || conversation.is_some() {
            converter.record();
        }
        converter.input(input)?;
        let input = converter.into_recorded();
        if conversation.is_some() {
            check_size(bytes, &input, "conversation")?;
        }
        let echoed = conversation.as_ref().map(|id| json!({"id": id}));
        echoed_fields.extend([
            ("conversation".to_owned(), json!(echoed)),
            ("instructions".to_owned(), json!(instructions)),
            ("previous_response_id".to_owned(), json!(previous)),
        ]);
        Ok(Self { instructions, previous, conversation, input, history })
    }
}

/// Parses `conversation`: an id, or an object that contains an id.
fn conversation_id(fields: &mut RequestFields) -> Result<Option<String>, ApiError> {
    const NAME: &str = "conversation";
    match fields.take(NAME) {
        None => Ok(None),
        Some(JsonValue::Str(id)) => Ok(Some(id)),
        Some(object @ JsonValue::Object(_)) => {
            RequestFields::of(NAME.to_owned(), object)?.required_string("id").map(Some)
        }
        Some(other) => Err(wrong_type(NAME.to_owned(), "a string or an object", &other)),
    }
}
