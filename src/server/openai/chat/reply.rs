//! Whole replies of chat completions.

use super::ReasoningField;
use super::convert;
use super::stream::Chunks;
use crate::engine_client::Ticket;
use crate::server::app::{App, Serving};
use crate::server::error::ApiError;
use crate::server::fields::Fields;
use crate::server::ids::CallNames;
use crate::server::openai::collect::{Whole, collect, stop_reason};
use crate::server::openai::exchange::{Endpoint, FromHeaders, Prepared, ReplyHead};
use crate::server::openai::generation::Generation;
use crate::server::openai::logprobs::{self, Spelling};
use crate::server::openai::message::{Call, Message};
use crate::server::openai::params::StreamOptions;
use crate::text::Tokenizer;
use bytes::BytesMut;
use protocol::Token;
use serde_json::{Value, json};
use std::sync::Arc;

/// Everything a reply needs besides tokens.
pub(super) struct Reply {
    pub(super) head: ReplyHead,
    pub(super) tokenizer: Arc<Tokenizer>,
    pub(super) spelling: Spelling,
    pub(super) logprobs: bool,
    pub(super) prompt_logprobs: bool,
    /// The last message of the assistant, if it shall be repeated.
    pub(super) echo: String,
    /// Ids of the prompt, if ids were asked for.
    pub(super) prompt_ids: Option<Vec<Token>>,
    pub(super) stream_options: StreamOptions,
    /// Ids of the calls.
    pub(super) names: CallNames,
    /// Where reasoning is shown, if it is.
    pub(super) reasoning: Option<ReasoningField>,
}

impl Endpoint for Reply {
    type Chunks = Chunks;

    fn prepare(
        app: &Arc<App>,
        serving: &Arc<Serving>,
        fields: Fields,
        headers: &FromHeaders,
        ticket: Ticket,
    ) -> Result<Prepared<Self>, ApiError> {
        convert::prepare(app, serving, fields, headers, ticket)
    }

    fn chunks(self) -> Chunks {
        Chunks::new(self)
    }

    async fn collect(self, generation: Generation) -> Result<String, ApiError> {
        let (wholes, generation) = collect(generation).await?;
        let choices: Value = (0..).zip(&wholes).map(|(i, whole)| self.choice(i, whole)).collect();
        let mut usage = BytesMut::new();
        generation.usage().write(&mut usage);
        let ReplyHead { id, created, model, fingerprint } = &self.head;
        let mut reply = json!({
            "id": id,
            "object": "chat.completion",
            "created": created,
            "model": model,
            "system_fingerprint": fingerprint,
            "choices": choices,
            "usage": serde_json::from_slice::<Value>(&usage).unwrap_or_default(),
        });
        if let Some(ids) = &self.prompt_ids {
            reply["prompt_token_ids"] = json!(ids);
        }
        let mut text = reply.to_string();
        if self.prompt_logprobs {
            let entries = generation.prompt_logprobs(0);
            logprobs::append_prompt(&self.tokenizer, self.spelling, entries, &mut text);
        }
        Ok(text)
    }
}

impl Reply {
    fn choice(&self, index: u32, whole: &Whole) -> Value {
        let mut choice = json!({
            "index": index,
            "message": self.message(Message::of(whole, index, &self.names)),
            "logprobs": Value::Null,
            "finish_reason": whole.end.name(),
            "stop_reason": stop_reason(&whole.end),
        });
        if self.logprobs {
            choice["logprobs"] = logprobs::chat(&self.tokenizer, self.spelling, &whole.logprobs);
        }
        if self.prompt_ids.is_some() {
            choice["token_ids"] = json!(whole.tokens);
        }
        choice
    }

    /// `content` is null where the model did something else instead of speaking.
    fn message(&self, message: Message) -> Value {
        let Message { reasoning, content, calls } = message;
        let content = self.echo.clone() + &content;
        let speaks = !content.is_empty() || calls.is_empty() && reasoning.is_empty();
        let mut value = json!({"role": "assistant", "content": speaks.then_some(content)});
        let fields = self.reasoning.map_or(&[][..], ReasoningField::names);
        for field in fields.iter().filter(|_| !reasoning.is_empty()) {
            value[*field] = Value::from(reasoning.as_str());
        }
        if !calls.is_empty() {
            value["tool_calls"] = calls.iter().map(call).collect();
        }
        value
    }
}

fn call(Call { id, name, arguments, .. }: &Call) -> Value {
    json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
}
