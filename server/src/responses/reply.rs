//! Response object of the Responses API, and non-streaming replies.

use super::compaction::check_threshold;
use super::developer_turns::place_turns;
use super::item_scope::ItemIdScope;
use super::items::{OutputItemIdGenerator, ResponseOutputItem, assistant_turn, of_message};
use super::response_items::ResponseItems;
use super::store::FinishedResponse;
use super::stored_context::StoredContextReader;
use super::stream::ResponsesEventWriter;
use super::truncation;
use super::types::{self, ResponsesRequest};
use crate::api_error::ApiError;
use crate::app::AppState;
use crate::auth::CallerIdentity;
use crate::openai::assistant_message::AssistantMessage;
use crate::openai::chat::generation_start::{StartedGeneration, start};
use crate::openai::chat::ignored_values::report_ignored;
use crate::openai::choice::ChoiceFinishReason;
use crate::openai::collect::{body_of, collect_one};
use crate::openai::endpoint::{
    EndpointRequest, InferenceEndpoint, SubmittedRequest, ignored_fields, unix_time,
};
use crate::openai::generation::RequestGeneration;
use crate::openai::usage::UsageInfo;
use crate::template_value_json::serialize_members;
use axum::body::Body;
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::sync::{Arc, OnceLock};

/// Formats the reply to a Responses request; contains all values that the reply needs in addition to the
/// generated tokens.
pub(super) struct ResponsesReplyFormatter {
    pub(super) app: Arc<AppState>,
    pub(super) id: String,
    /// Identity of the caller; only this caller can access the stored response.
    pub(super) owner: CallerIdentity,
    pub(super) item_ids: OutputItemIdGenerator,
    created: u64,
    /// Completion time of the response: Unix time in seconds.
    completed: OnceLock<u64>,
    model: String,
    echoed_fields: Map<String, Value>,
    /// Conversation before this response's output, as chat template messages.
    history: Vec<Value>,
    /// Id of the conversation to which the input and output items are appended.
    conversation: Option<String>,
    /// Stored items of the response before its output: its input items.
    input: ResponseItems,
    store: bool,
    background: bool,
}

/// Value of `status` in a response object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ResponseStatus {
    Queued,
    InProgress,
    Completed,
    Incomplete,
    Failed,
}

/// JSON form of a response object.
#[derive(Serialize)]
pub(super) struct ResponseObject<'a> {
    id: &'a str,
    object: &'static str,
    created_at: u64,
    completed_at: Option<u64>,
    status: ResponseStatus,
    model: &'a str,
    output: &'a [ResponseOutputItem],
    error: Option<Value>,
    incomplete_details: Option<Value>,
    usage: Option<Value>,
    #[serde(flatten, serialize_with = "serialize_members")]
    echoed_fields: &'a Map<String, Value>,
}

impl ResponsesReplyFormatter {
    pub(super) fn is_background(&self) -> bool {
        self.background
    }

    /// Builds the response object with the given output items.
    pub(super) fn body<'a>(
        &'a self,
        state: ResponseStatus,
        output: &'a [ResponseOutputItem],
        usage: Option<&UsageInfo>,
    ) -> ResponseObject<'a> {
        let incomplete_details = json!({"reason": "max_output_tokens"});
        let is_completed = state == ResponseStatus::Completed;
        ResponseObject {
            id: &self.id,
            object: "response",
            created_at: self.created,
            completed_at: is_completed.then(|| *self.completed.get_or_init(unix_time)),
            status: state,
            model: &self.model,
            output,
            error: None,
            incomplete_details: (state == ResponseStatus::Incomplete).then_some(incomplete_details),
            usage: usage.map(usage_body),
            echoed_fields: &self.echoed_fields,
        }
    }

    /// Builds the response object of a failed response.
    pub(super) fn failed<'a>(
        &'a self,
        error: &ApiError,
        output: &'a [ResponseOutputItem],
    ) -> ResponseObject<'a> {
        let error = json!({"code": "server_error", "message": error.message});
        ResponseObject { error: Some(error), ..self.body(ResponseStatus::Failed, output, None) }
    }

    /// Returns the conversation including this response's output, as chat template messages.
    fn history(&self, output: &[ResponseOutputItem]) -> Value {
        self.history.iter().cloned().chain([assistant_turn(output)]).collect()
    }

    /// Stores a finished response if the request set `store`.
    pub(super) fn store_response(&self, body: &str, output: &[ResponseOutputItem]) {
        if self.store {
            self.app.responses.put(self.owner, &self.id, self.finished(body.to_owned(), output));
        }
    }

    /// Returns the data of the finished response that is stored.
    pub(super) fn finished(&self, body: String, output: &[ResponseOutputItem]) -> FinishedResponse {
        let items = self.input.with_output(output);
        FinishedResponse { body, history: self.history(output), items }
    }

    /// Returns the stored items of the response with an empty output: only the input items.
    pub(super) fn input_items(&self) -> ResponseItems {
        self.input.with_output(&[])
    }

    /// Appends the input and output items to the conversation of the request, unless the conversation has
    /// been deleted or evicted.
    pub(super) fn extend_conversation(&self, output: &[ResponseOutputItem]) {
        let Some(id) = &self.conversation else { return };
        let items = self.input.with_output(output);
        if !self.app.conversations.extend(self.owner, id, items.all()) {
            tracing::debug!("the conversation of a finished response is no longer stored");
        }
    }

    /// Waits for the complete output; returns the response object as JSON text, and the output items.
    pub(super) async fn finish(
        &self,
        generation: RequestGeneration,
    ) -> Result<(String, Vec<ResponseOutputItem>), ApiError> {
        let (choice, generation) = collect_one(generation).await?;
        let state = state(&choice.end);
        let message = AssistantMessage::of(&choice, 0, &self.item_ids.tool_call_ids);
        let items = of_message(message, &self.item_ids, state == ResponseStatus::Incomplete);
        let body = body_of(&self.body(state, &items, Some(&generation.usage())))?;
        if state != ResponseStatus::Failed {
            self.extend_conversation(&items);
        }
        Ok((body, items))
    }
}

/// Returns the status of a response, given the reason why its choice ended.
pub(super) fn state(end: &ChoiceFinishReason) -> ResponseStatus {
    match end {
        ChoiceFinishReason::Stop(_) | ChoiceFinishReason::Calls(_) => ResponseStatus::Completed,
        ChoiceFinishReason::Length => ResponseStatus::Incomplete,
        ChoiceFinishReason::Abort(_)
        | ChoiceFinishReason::Error(_)
        | ChoiceFinishReason::Rejected(_) => ResponseStatus::Failed,
    }
}

fn usage_body(usage: &UsageInfo) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens.unwrap_or(0)},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    })
}

impl InferenceEndpoint for ResponsesReplyFormatter {
    type StreamWriter = ResponsesEventWriter;

    fn prepare(request: EndpointRequest<'_>) -> Result<SubmittedRequest<Self>, ApiError> {
        let EndpointRequest { app, serving, mut fields, headers, mut permit } = request;
        let mut stored = StoredContextReader::new(app, headers.caller, &mut permit);
        let parsed = types::take(&mut fields, serving, &mut stored)?;
        let mut ignored = ignored_fields(app, &fields)?;
        let ResponsesRequest { mut request, history, echoed_fields, tool_names, .. } = parsed;
        let ResponsesRequest { previous, conversation, input, truncates, compaction, .. } = parsed;
        let ResponsesRequest { store, background, .. } = parsed;
        if background && request.params.stream {
            let message = "background responses cannot be streamed";
            return Err(ApiError::unsupported("stream", message));
        }
        report_ignored(app, serving, &request, &mut ignored)?;
        let has_tools = !request.tools.template_value.is_null();
        let place = |messages| place_turns(app, serving, messages, has_tools).into();
        request.input.messages = match request.input.messages.take() {
            Value::Array(messages) if truncates => {
                truncation::truncate(serving, &request, &messages, place)?
            }
            Value::Array(messages) => place(messages),
            other => other,
        };
        if let Some(threshold) = compaction {
            check_threshold(&threshold, serving, &request)?;
        }
        let started = start(app, serving, request, headers, permit)?;
        let StartedGeneration { generation, model, request_id, params, tool_call_ids, .. } =
            started;
        // The id does not contain the request id: request ids are chosen by clients, so a client could
        // overwrite another client's response.
        let response_hex = app.id_generator.id();
        let scope = ItemIdScope::new(&response_hex, conversation.as_deref());
        let input = ResponseItems::of_input(previous, input, &scope);
        let input_items = input.input.len();
        let reply = Self {
            app: Arc::clone(app),
            id: format!("resp_{response_hex}"),
            owner: headers.caller,
            item_ids: OutputItemIdGenerator { scope, input_items, tool_call_ids, tool_names },
            created: unix_time(),
            completed: OnceLock::new(),
            model,
            echoed_fields,
            history,
            conversation,
            input,
            store,
            background,
        };
        Ok(SubmittedRequest { generation, reply, stream: params.stream, request_id, ignored })
    }

    fn stream_writer(self) -> ResponsesEventWriter {
        ResponsesEventWriter::new(self)
    }

    async fn collect(self, generation: RequestGeneration) -> Result<Body, ApiError> {
        let (body, items) = self.finish(generation).await?;
        self.store_response(&body, &items);
        Ok(Body::from(body))
    }
}
