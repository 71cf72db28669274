//! The response object, and whole replies.

use super::items::{Item, ItemNames, as_turn, of_message};
use super::stream::Events;
use super::types::{self, Asked};
use crate::engine_client::Ticket;
use crate::server::app::{App, Serving};
use crate::server::error::ApiError;
use crate::server::fields::Fields;
use crate::server::keys::Caller;
use crate::server::openai::chat::start::{Started, start};
use crate::server::openai::choice::End;
use crate::server::openai::collect::{body_of, collect_single};
use crate::server::openai::exchange::{Endpoint, FromHeaders, Prepared, ignored, unix_time};
use crate::server::openai::generation::Generation;
use crate::server::openai::message::Message;
use crate::server::openai::usage::Usage;
use axum::body::Body;
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Everything a reply needs besides tokens.
pub(super) struct Reply {
    pub(super) app: Arc<App>,
    pub(super) id: String,
    /// For whom it is kept.
    pub(super) owner: Caller,
    pub(super) names: ItemNames,
    created: u64,
    model: String,
    repeated: Map<String, Value>,
    /// The conversation so far.
    history: Vec<Value>,
    store: bool,
    background: bool,
}

/// How far a response is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum State {
    Queued,
    InProgress,
    Completed,
    Incomplete,
    Failed,
}

/// A response as it is written.
#[derive(Serialize)]
pub(super) struct ResponseBody<'a> {
    id: &'a str,
    object: &'static str,
    created_at: u64,
    status: State,
    model: &'a str,
    output: &'a [Item],
    error: Option<Value>,
    incomplete_details: Option<Value>,
    usage: Option<Value>,
    #[serde(flatten)]
    repeated: &'a Map<String, Value>,
}

impl Reply {
    pub(super) fn is_background(&self) -> bool {
        self.background
    }

    /// The response object with what there is so far.
    pub(super) fn body<'a>(
        &'a self,
        state: State,
        output: &'a [Item],
        usage: Option<&Usage>,
    ) -> ResponseBody<'a> {
        let cut = json!({"reason": "max_output_tokens"});
        ResponseBody {
            id: &self.id,
            object: "response",
            created_at: self.created,
            status: state,
            model: &self.model,
            output,
            error: None,
            incomplete_details: (state == State::Incomplete).then_some(cut),
            usage: usage.map(usage_body),
            repeated: &self.repeated,
        }
    }

    /// The object of a response that failed.
    pub(super) fn failed<'a>(&'a self, error: &ApiError, output: &'a [Item]) -> ResponseBody<'a> {
        let error = json!({"code": "server_error", "message": error.message});
        ResponseBody { error: Some(error), ..self.body(State::Failed, output, None) }
    }

    /// The conversation with this response.
    pub(super) fn history(&self, output: &[Item]) -> Value {
        self.history.iter().cloned().chain([as_turn(output)]).collect()
    }

    /// Keeps a finished response, if that was asked for.
    pub(super) fn keep(&self, body: &str, output: &[Item]) {
        if self.store {
            self.app.responses.put(self.owner, &self.id, body.to_owned(), &self.history(output));
        }
    }

    /// Waits for the whole answer.
    pub(super) async fn finish(
        &self,
        generation: Generation,
    ) -> Result<(String, Vec<Item>), ApiError> {
        let (whole, generation) = collect_single(generation).await?;
        let state = state(&whole.end);
        let message = Message::of(&whole, 0, &self.names.calls);
        let items = of_message(message, &self.names, state == State::Incomplete);
        let body = body_of(&self.body(state, &items, Some(&generation.usage())))?;
        Ok((body, items))
    }
}

/// How a response ends whose choice ended like this.
pub(super) fn state(end: &End) -> State {
    match end {
        End::Stop(_) | End::Calls(_) => State::Completed,
        End::Length => State::Incomplete,
        End::Abort(_) | End::Error(_) | End::Refused(_) => State::Failed,
    }
}

fn usage_body(usage: &Usage) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens.unwrap_or(0)},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    })
}

impl Endpoint for Reply {
    type Chunks = Events;

    fn prepare(
        app: &Arc<App>,
        serving: &Arc<Serving>,
        mut fields: Fields,
        headers: &FromHeaders,
        ticket: Ticket,
    ) -> Result<Prepared<Self>, ApiError> {
        let kept = |id: &str| app.responses.history(headers.caller, id);
        let asked = types::take(&mut fields, &serving.bounds, &serving.defaults, kept)?;
        let ignored = ignored(app, &fields)?;
        let Asked { request, history, repeated, store, background } = asked;
        if background && request.params.stream {
            let message = "a response that is made in the background is not streamed";
            return Err(ApiError::unsupported("stream", message));
        }
        let started = start(app, serving, request, headers, ticket)?;
        let Started { generation, model, request_id, params, names: calls, .. } = started;
        let reply = Self {
            app: Arc::clone(app),
            // Not the client's: under it others could overwrite what is kept.
            id: format!("resp_{}", app.random.id()),
            owner: headers.caller,
            names: ItemNames { request_id: request_id.clone(), calls },
            created: unix_time(),
            model,
            repeated,
            history,
            store,
            background,
        };
        Ok(Prepared { generation, reply, stream: params.stream, request_id, ignored })
    }

    fn chunks(self) -> Events {
        Events::new(self)
    }

    async fn collect(self, generation: Generation) -> Result<Body, ApiError> {
        let (body, items) = self.finish(generation).await?;
        self.keep(&body, &items);
        Ok(Body::from(body))
    }
}
