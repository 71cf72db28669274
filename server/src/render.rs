//! `/v1/chat/completions/render` and `/v1/completions/render`: return the token ids of a completion's prompts
//! and the generation parameters, in vLLM's format. Nothing is generated.

use super::api_error::ApiError;
use super::app::{AppState, ServingContext};
use super::openai::chat;
use super::openai::completions as text_completions;
use super::openai::params::CompletionParams;
use super::tokenize::serve;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::Response;
use engine::AdmissionPermit;
use protocol::Token;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Bytes reserved in the memory budget per token id in a reply: the id itself and its JSON text.
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
        let mut objects = objects(app, serving, &rendered, "chatcmpl", permit)?;
        Ok(Body::from(objects.swap_remove(0).to_string()))
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
        let objects = objects(app, serving, &rendered, "cmpl", permit)?;
        Ok(Body::from(Value::from(objects).to_string()))
    })
    .await
}

/// Returns one object per prompt. `kind` is the prefix of the request ids.
fn objects(
    app: &AppState,
    serving: &ServingContext,
    rendered: &RenderedRequest,
    kind: &str,
    mut permit: AdmissionPermit,
) -> Result<Vec<Value>, ApiError> {
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
    let prompts = rendered.prompts.iter().zip(&rendered.max_tokens);
    let object = |(ids, &max_tokens): (&Vec<Token>, &u32)| {
        let request_id = params.request_id.clone().unwrap_or_else(|| app.id_generator.id());
        json!({
            "request_id": format!("{kind}-{request_id}"),
            "token_ids": ids,
            "features": null,
            "sampling_params": sampling_params(rendered, max_tokens),
            "model": model,
            "stream": params.stream,
            "stream_options": stream_options,
            "cache_salt": params.cache_salt,
            "priority": params.priority,
            "kv_transfer_params": null,
        })
    };
    Ok(prompts.map(object).collect())
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
