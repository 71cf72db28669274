//! POST `/tokenize` and `/detokenize`, GET `/tokenizer_info`.

mod answer;
mod types;

use super::app::{App, Serving};
use super::body;
use super::error::ApiError;
use super::fields::Fields;
use super::json::Json;
use super::openai::chat::start::render;
use super::openai::exchange::{FromHeaders, ignored, json_body, json_response, label};
use super::openai::params::Bounds;
use super::openai::submit::text_error;
use super::piece_body::body_of;
use super::routes::unknown_route;
use crate::engine_client::Ticket;
use crate::text::ChatTemplate;
use answer::{TextWriter, TokensWriter};
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::Response;
use protocol::Token;
use serde_json::{Value, json};
use std::mem::size_of;
use std::sync::Arc;
use types::{Detokenize, Subject, Tokenize};

/// Bytes of the ids that an answer holds.
const ID_BYTES: u64 = size_of::<Token>() as u64;

/// Text or messages to ids.
pub async fn tokenize(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    answer(app, request, |app, serving, fields, mut ticket| {
        let request = Tokenize::take(fields)?;
        serving.check_model(request.model.as_deref())?;
        let special = request.add_special_tokens;
        let ids = match request.subject {
            Subject::Text(text) => {
                let encoded = serving.tokenizer.encode(&text, special.unwrap_or(true));
                encoded.map_err(|error| text_error(&error, "prompt"))?
            }
            Subject::Chat(input) => {
                render(serving, *input, special.unwrap_or(false), "messages")?.ids
            }
        };
        ticket.hold_bytes(ID_BYTES * ids.len() as u64).map_err(|o| app.overloaded(&o))?;
        let spelling = request.token_strs.then(|| Arc::clone(&serving.tokenizer));
        let writer = TokensWriter::new(ids, serving.bounds.max_model_len, spelling);
        Ok(body_of(writer, ticket))
    })
    .await
}

/// Ids to text.
pub async fn detokenize(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    answer(app, request, |app, serving, fields, mut ticket| {
        let request = Detokenize::take(fields, serving.bounds.vocab_size)?;
        serving.check_model(request.model.as_deref())?;
        let bytes = ID_BYTES * request.tokens.len() as u64;
        ticket.hold_bytes(bytes).map_err(|o| app.overloaded(&o))?;
        Ok(body_of(TextWriter::new(request.tokens, Arc::clone(&serving.tokenizer)), ticket))
    })
    .await
}

/// The tokenizer's configuration and the chat template in force, where the operator shows them.
pub async fn info(State(app): State<Arc<App>>) -> Result<Response<Body>, ApiError> {
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

/// The frame around all that only counts or spells tokens: limits, admission, the text pool, the reply. What the request
/// holds of the counters is the work's, to keep for as long as its answer takes memory.
pub async fn answer(
    app: Arc<App>,
    request: Request,
    work: impl FnOnce(&App, &Arc<Serving>, &mut Fields, Ticket) -> Result<Body, ApiError>
    + Send
    + 'static,
) -> Result<Response<Body>, ApiError> {
    let serving = Arc::clone(app.serving()?);
    let (parts, body) = request.into_parts();
    let (body, ticket) = body::admit(&app, &serving, &parts.headers, body).await?;
    let bytes = body.len();
    let (pool, headers) = (Arc::clone(&app), FromHeaders::read(&parts.headers, &app.options.keys));
    let work = move || {
        let json = Json::parse(&body)?;
        drop(body); // What follows needs the memory more.
        let mut fields = Fields::of_body(json)?;
        let body = work(&app, &serving, &mut fields, ticket)?;
        Ok((body, ignored(&app, &fields)?))
    };
    let (body, ignored) = pool.text.run(bytes, work).await.map_err(|error| pool.advise(error))?;
    let mut response = json_body(body);
    label(&mut response, headers.request_id.as_deref(), &ignored);
    Ok(response)
}

/// Whether a body of `/tokenize` would be taken, as far as its fields alone decide.
pub(crate) fn check_tokenize(fields: &mut Fields) -> Result<(), ApiError> {
    Tokenize::take(fields).map(|_| ())
}

/// Whether a body of `/detokenize` would be taken, as far as its fields alone decide.
pub(crate) fn check_detokenize(fields: &mut Fields, bounds: &Bounds) -> Result<(), ApiError> {
    Detokenize::take(fields, bounds.vocab_size).map(|_| ())
}
