//! Whole replies of the Messages API.

use super::stream::Events;
use super::types;
use crate::engine_client::Ticket;
use crate::server::app::{App, Serving};
use crate::server::error::ApiError;
use crate::server::fields::Fields;
use crate::server::ids::CallNames;
use crate::server::openai::chat::start::{Started, start};
use crate::server::openai::choice::{End, StoppedBy};
use crate::server::openai::collect::{Whole, body_of, collect_single};
use crate::server::openai::exchange::{Endpoint, FromHeaders, Prepared, ignored};
use crate::server::openai::generation::Generation;
use crate::server::openai::message::Message;
use crate::server::openai::usage::Usage;
use crate::text::cut_arguments;
use axum::body::Body;
use serde::Serialize;
use serde_json::Value;
use std::sync::Arc;

/// Everything a reply needs besides tokens.
pub(super) struct Reply {
    pub(super) id: String,
    pub(super) model: String,
    pub(super) names: CallNames,
}

/// A message as it is written.
#[derive(Serialize)]
pub(super) struct MessageBody<'a> {
    id: &'a str,
    r#type: &'static str,
    role: &'static str,
    model: &'a str,
    content: Vec<Block>,
    stop_reason: Option<&'static str>,
    stop_sequence: Option<&'a str>,
    usage: UsageBody,
}

/// A part of a message.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum Block {
    Thinking { thinking: String, signature: &'static str },
    Text { text: String },
    ToolUse { id: String, name: String, input: Value },
}

/// Token counts: what was read from the cache is apart.
#[derive(Serialize, Clone, Copy)]
pub(super) struct UsageBody {
    #[serde(rename = "input_tokens")]
    input: u64,
    #[serde(rename = "cache_read_input_tokens")]
    cache_read: u64,
    #[serde(rename = "cache_creation_input_tokens")]
    cache_creation: u64,
    #[serde(rename = "output_tokens")]
    output: u64,
}

impl From<&Usage> for UsageBody {
    fn from(usage: &Usage) -> Self {
        Self {
            input: usage.prompt_tokens.saturating_sub(usage.cached_tokens),
            cache_read: usage.cached_tokens,
            // Caching costs nothing extra here, so nothing is billed as creation.
            cache_creation: 0,
            output: usage.completion_tokens,
        }
    }
}

/// `stop_reason` and `stop_sequence`.
pub(super) fn stop(end: &End) -> (Option<&'static str>, Option<&str>) {
    match end {
        End::Stop(StoppedBy::Text(text)) => (Some("stop_sequence"), Some(text)),
        End::Stop(_) => (Some("end_turn"), None),
        End::Calls(_) => (Some("tool_use"), None),
        End::Length => (Some("max_tokens"), None),
        End::Abort(_) | End::Error(_) | End::Refused(_) => (None, None),
    }
}

impl Reply {
    pub(super) fn body<'a>(
        &'a self,
        content: Vec<Block>,
        end: Option<&'a End>,
        usage: &Usage,
    ) -> MessageBody<'a> {
        let (stop_reason, stop_sequence) = end.map_or((None, None), stop);
        MessageBody {
            id: &self.id,
            r#type: "message",
            role: "assistant",
            model: &self.model,
            content,
            stop_reason,
            stop_sequence,
            usage: usage.into(),
        }
    }

    fn blocks(&self, whole: &Whole) -> Vec<Block> {
        let Message { reasoning, content, calls } = Message::of(whole, 0, &self.names);
        let mut blocks = Vec::new();
        if !reasoning.is_empty() {
            blocks.push(Block::Thinking { thinking: reasoning, signature: "" });
        }
        if !content.is_empty() {
            blocks.push(Block::Text { text: content });
        }
        blocks.extend(calls.into_iter().map(|call| {
            // Of a call that was cut, what the parts of a stream come to.
            let input = Value::Object(cut_arguments(&call.arguments));
            Block::ToolUse { id: call.id, name: call.name, input }
        }));
        blocks
    }
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
        let request = types::take(&mut fields, &serving.bounds, &serving.defaults)?;
        let ignored = ignored(app, &fields)?;
        let started = start(app, serving, request, headers, ticket)?;
        let Started { generation, model, request_id, params, names, .. } = started;
        let reply = Self { id: format!("msg_{request_id}"), model, names };
        Ok(Prepared { generation, reply, stream: params.stream, request_id, ignored })
    }

    fn chunks(self) -> Events {
        Events::new(self)
    }

    async fn collect(self, generation: Generation) -> Result<Body, ApiError> {
        let (whole, generation) = collect_single(generation).await?;
        let body = self.body(self.blocks(&whole), Some(&whole.end), &generation.usage());
        body_of(&body).map(Body::from)
    }
}
