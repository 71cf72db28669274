//! Parses what a Responses request continues and adds: instructions, an earlier response or conversation, and
//! the input.

use super::convert::InputItemConverter;
use super::stored_context::StoredContextReader;
use crate::api_error::ApiError;
use crate::conversations::check_size;
use crate::request_fields::{RequestFields, wrong_type};
use crate::strict_json::JsonValue;
use serde_json::{Map, Value, json};

/// Context of one response.
pub(super) struct RequestContext {
    pub(super) instructions: Option<String>,
    /// Id of the response that the request continues.
    pub(super) previous: Option<String>,
    /// Id of the conversation that the response continues and extends.
    pub(super) conversation: Option<String>,
    /// Input items of the request, if they are stored.
    pub(super) input: Vec<Value>,
    /// Conversation with the input, without instructions, as template messages.
    pub(super) history: Vec<Value>,
}

impl RequestContext {
    /// Parses the context of a request, and adds it to the fields of the response object. `stored` are the
    /// objects that the request may continue or refer to; `stores_input` says whether the input is stored with the
    /// response.
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
        let mut converter = InputItemConverter::new(&mut history, stored, fields.hints_mut());
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

/// Parses `conversation`: an id, or an object with an id.
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
