//! `/v1/chat/completions/render` and `/v1/completions/render`: return the token ids of a completion's prompts
//! and the generation parameters, in vLLM's format. Nothing is generated.

use super::api_error::ApiError;
use super::app::{AppState, ServingContext};
use super::openai::chat;
use super::openai::completions as text_completions;
use super::openai::params::CompletionParams;
use super::piece_body::{IncrementalBodyWriter, body_of};
use super::tokenize::serve;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::Response;
use bytes::{BufMut, BytesMut};
use engine::AdmissionPermit;
use protocol::Token;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Bytes reserved in the memory budget per token id in a reply: the id itself, and its JSON text while the object
/// of its prompt is written.
const ID_BYTES: u64 = 16;

/// Prompts of a completion, and its generation parameters.
pub(crate) struct RenderedRequest {
    /// Token ids of each prompt.
    pub prompts: Vec<Vec<Token>>,
    /// Maximum number of output tokens for each prompt.
    pub max_tokens: Vec<u32>,
    /// Parameters shared by chat and text completions.
    pub params: CompletionParams,
    /// Number of top-k log-probabilities per output token.
    pub logprobs: Option<u32>,
}

/// Handles `/v1/chat/completions/render`: returns one object.
pub(crate) async fn chat(
    State(app): State<Arc<AppState>>,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    serve(app, request, |app, serving, fields, permit| {
        let rendered = chat::render_request(serving, fields)?;
        reply_body(app, serving, rendered, RenderReplyFormat::CHAT, permit)
    })
    .await
}

/// Handles `/v1/completions/render`: returns a list with one object per prompt.
pub(crate) async fn completions(
    State(app): State<Arc<AppState>>,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    serve(app, request, |app, serving, fields, permit| {
        let rendered = text_completions::render_request(serving, fields)?;
        reply_body(app, serving, rendered, RenderReplyFormat::COMPLETIONS, permit)
    })
    .await
}

/// JSON text around and between the objects of a reply, and the prefix of their request ids.
#[derive(Debug, Clone, Copy)]
struct RenderReplyFormat {
    id_prefix: &'static str,
    open: &'static str,
    close: &'static str,
}

impl RenderReplyFormat {
    const CHAT: Self = Self { id_prefix: "chatcmpl", open: "", close: "" };
    const COMPLETIONS: Self = Self { id_prefix: "cmpl", open: "[", close: "]" };
}

/// Creates the reply body with one object per prompt. It holds `permit` until it is dropped.
///
/// Errors: HTTP status 404 if the model is unknown, 429 or 400 if the token ids exceed the memory budget.
fn reply_body(
    app: &AppState,
    serving: &ServingContext,
    rendered: RenderedRequest,
    format: RenderReplyFormat,
    mut permit: AdmissionPermit,
) -> Result<Body, ApiError> {
    let params = &rendered.params;
    let model = serving.check_model(params.model.as_deref())?;
    let tokens: usize = rendered.prompts.iter().map(Vec::len).sum();
    permit.reserve_bytes(ID_BYTES * tokens as u64).map_err(|o| app.overloaded(&o))?;
    let stream_options = params.stream.then(|| {
        let options = params.effective_stream_options(&app.options);
        json!({
            "include_usage": options.include_usage,
            "continuous_usage_stats": options.continuous_usage,
        })
    });
    let request_id = || params.request_id.clone().unwrap_or_else(|| app.id_generator.id());
    let request_ids = rendered.prompts.iter().map(|_| request_id()).collect();
    Ok(body_of(
        RenderReplyWriter { rendered, model, stream_options, request_ids, format, next: 0 },
        permit,
    ))
}

/// Writes the reply of a render route, one object at a time: every object repeats the sampling parameters, so
/// all objects of a reply may take hundreds of times the memory of the request.
struct RenderReplyWriter {
    rendered: RenderedRequest,
    model: String,
    stream_options: Option<Value>,
    /// Request id of each prompt, without prefix.
    request_ids: Vec<String>,
    format: RenderReplyFormat,
    /// Index of the next prompt to write.
    next: usize,
}

impl RenderReplyWriter {
    /// Returns the object of the prompt with index `index`.
    fn object(&self, index: usize) -> Value {
        let params = &self.rendered.params;
        json!({
            "request_id": format!("{}-{}", self.format.id_prefix, self.request_ids[index]),
            "token_ids": self.rendered.prompts[index],
            "features": null,
            "sampling_params": sampling_params(&self.rendered, self.rendered.max_tokens[index]),
            "model": self.model,
            "stream": params.stream,
            "stream_options": self.stream_options,
            "cache_salt": params.cache_salt,
            "priority": params.priority,
            "kv_transfer_params": null,
        })
    }
}

impl IncrementalBodyWriter for RenderReplyWriter {
    fn write(&mut self, bytes: usize, out: &mut BytesMut) -> bool {
        let end = out.len() + bytes;
        while out.len() < end && self.next < self.rendered.prompts.len() {
            let separator = if self.next == 0 { self.format.open } else { "," };
            out.put_slice(separator.as_bytes());
            out.put_slice(self.object(self.next).to_string().as_bytes());
            self.next += 1;
            if self.next == self.rendered.prompts.len() {
                out.put_slice(self.format.close.as_bytes());
            }
        }
        self.next < self.rendered.prompts.len()
    }
}

/// Returns the sampling parameters under vLLM's names.
fn sampling_params(rendered: &RenderedRequest, max_tokens: u32) -> Value {
    let (params, sampling) = (&rendered.params, &rendered.params.sampling);
    let biases = sampling.logit_bias.iter().map(|(token, bias)| (token.to_string(), json!(bias)));
    json!({
        "n": params.n,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "seed": params.seed,
        "stop": params.stop,
        "stop_token_ids": params.stop_ids,
        "include_stop_str_in_output": params.include_stop,
        "ignore_eos": params.ignore_eos,
        "max_tokens": max_tokens,
        "min_tokens": sampling.min_tokens,
        "logprobs": rendered.logprobs,
        "prompt_logprobs": params.prompt_logprobs,
        "skip_special_tokens": params.skip_special,
        "bad_words": params.bad_words,
        "allowed_token_ids": sampling.allowed_token_ids,
        "logit_bias": biases.collect::<Map<String, Value>>(),
    })
}
