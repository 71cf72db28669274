//! POST `/tokenize` and `/detokenize`, GET `/tokenizer_info`.

mod reply;
mod types;

use super::api_error::ApiError;
use super::app::{AppState, ServingContext};
use super::openai::chat::generation_start::render;
use super::openai::endpoint::{
    HeaderParams, add_reply_headers, ignored_fields, json_body, json_response,
};
use super::openai::params::FieldBounds;
use super::openai::submit::text_error;
use super::piece_body::body_of;
use super::request_body;
use super::request_fields::RequestFields;
use super::routes::unknown_route;
use super::strict_json::JsonValue;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::Response;
use engine::AdmissionPermit;
use protocol::Token;
use reply::{DetokenizeReplyWriter, TokenizeReplyWriter};
use serde_json::{Value, json};
use std::mem::size_of;
use std::sync::Arc;
use text::ChatTemplate;
use types::{DetokenizeRequest, TokenizeInput, TokenizeRequest};

/// Bytes reserved in the memory budget per token id in a reply.
const ID_BYTES: u64 = size_of::<Token>() as u64;

/// Handles `/tokenize`: returns the token ids of a text or a conversation.
pub(crate) async fn tokenize(
    State(app): State<Arc<AppState>>,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    serve(app, request, |app, serving, fields, mut permit| {
        let request = TokenizeRequest::take(fields)?;
        serving.check_model(request.model.as_deref())?;
        let special = request.add_special_tokens;
        let ids = match request.input {
            TokenizeInput::Text(text) => {
                let encoded = serving.tokenizer.encode(&text, special.unwrap_or(true));
                encoded.map_err(|error| text_error(&error, "prompt"))?
            }
            TokenizeInput::Chat(input) => {
                render(serving, *input, special.unwrap_or(false), "messages")?.ids
            }
        };
        permit.reserve_bytes(ID_BYTES * ids.len() as u64).map_err(|o| app.overloaded(&o))?;
        let token_strs_tokenizer = request.token_strs.then(|| Arc::clone(&serving.tokenizer));
        let writer =
            TokenizeReplyWriter::new(ids, serving.field_bounds.max_model_len, token_strs_tokenizer);
        Ok(body_of(writer, permit))
    })
    .await
}

/// Handles `/detokenize`: returns the text of token ids.
pub(crate) async fn detokenize(
    State(app): State<Arc<AppState>>,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    serve(app, request, |app, serving, fields, mut permit| {
        let request = DetokenizeRequest::take(fields, serving.field_bounds.vocab_size)?;
        serving.check_model(request.model.as_deref())?;
        let bytes = ID_BYTES * request.tokens.len() as u64;
        permit.reserve_bytes(bytes).map_err(|o| app.overloaded(&o))?;
        Ok(body_of(
            DetokenizeReplyWriter::new(request.tokens, Arc::clone(&serving.tokenizer)),
            permit,
        ))
    })
    .await
}

/// Handles `/tokenizer_info`, if enabled: returns the tokenizer configuration and the active chat template.
pub(crate) async fn info(State(app): State<Arc<AppState>>) -> Result<Response<Body>, ApiError> {
    if !app.options.tokenizer_info {
        return Err(unknown_route());
    }
    let serving = app.serving()?;
    let mut info = serving.tokenizer.config().as_object().cloned().unwrap_or_default();
    info.entry("tokenizer_class").or_insert_with(|| json!("PreTrainedTokenizerFast"));
    if let Some(template) = serving.template.as_ref().and_then(ChatTemplate::source) {
        info.insert("chat_template".to_owned(), json!(template));
    }
    Ok(json_response(Value::Object(info).to_string()))
}

/// Handles a request of a route that generates no tokens, such as `/tokenize`: checks limits, admits the
/// request, runs `work` on the text pool and returns its result as the reply. `work` receives the admission
/// permit, which reserves memory until the reply is sent.
pub(crate) async fn serve(
    app: Arc<AppState>,
    request: Request,
    work: impl FnOnce(
        &AppState,
        &Arc<ServingContext>,
        &mut RequestFields,
        AdmissionPermit,
    ) -> Result<Body, ApiError>
    + Send
    + 'static,
) -> Result<Response<Body>, ApiError> {
    let serving = Arc::clone(app.serving()?);
    let (parts, body) = request.into_parts();
    let (body, permit) = request_body::read_and_admit(&app, &serving, &parts.headers, body).await?;
    let bytes = body.len();
    let (pool, headers) =
        (Arc::clone(&app), HeaderParams::read(&parts.headers, &app.options.api_keys));
    let work = move || {
        let json = JsonValue::parse(&body)?;
        drop(body); // Frees the memory before the work that follows.
        let mut fields = RequestFields::of_body(json)?;
        let body = work(&app, &serving, &mut fields, permit)?;
        Ok((body, ignored_fields(&app, &fields)?))
    };
    let (body, ignored) =
        pool.text_pool.run(bytes, work).await.map_err(|error| pool.complete_engine_error(error))?;
    let mut response = json_body(body);
    add_reply_headers(&mut response, headers.request_id.as_deref(), &ignored);
    Ok(response)
}

/// Validates the fields of a `/tokenize` request.
pub(crate) fn check_tokenize(fields: &mut RequestFields) -> Result<(), ApiError> {
    TokenizeRequest::take(fields).map(|_| ())
}

/// Validates the fields of a `/detokenize` request.
pub(crate) fn check_detokenize(
    fields: &mut RequestFields,
    bounds: &FieldBounds,
) -> Result<(), ApiError> {
    DetokenizeRequest::take(fields, bounds.vocab_size).map(|_| ())
}
