//! POST `/tokenize` and `/detokenize`, GET `/tokenizer_info`.

mod types;

use super::app::{App, Serving};
use super::body;
use super::error::ApiError;
use super::fields::Fields;
use super::json::Json;
use super::openai::chat::start::render;
use super::openai::exchange::{FromHeaders, ignored, json_response, label};
use super::openai::params::Bounds;
use super::openai::submit::text_error;
use super::routes::unknown_route;
use crate::text::ChatTemplate;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::Response;
use serde_json::{Value, json};
use std::sync::Arc;
use types::{Detokenize, Subject, Tokenize};

/// Text or messages to ids.
pub async fn tokenize(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    answer(app, request, |serving, fields| {
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
        let spelling = |id: &u32| serving.tokenizer.token_spelling(*id).unwrap_or_default();
        let strs = request.token_strs.then(|| ids.iter().map(spelling).collect::<Vec<_>>());
        Ok(json!({
            "count": ids.len(),
            "max_model_len": serving.bounds.max_model_len,
            "tokens": ids,
            "token_strs": strs,
        }))
    })
    .await
}

/// Ids to text.
pub async fn detokenize(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    answer(app, request, |serving, fields| {
        let request = Detokenize::take(fields, serving.bounds.vocab_size)?;
        serving.check_model(request.model.as_deref())?;
        Ok(json!({"prompt": serving.tokenizer.decode(&request.tokens, false)}))
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

/// The frame around all that only counts or spells tokens: limits, admission, the text pool, the reply.
pub async fn answer(
    app: Arc<App>,
    request: Request,
    work: impl FnOnce(&Arc<Serving>, &mut Fields) -> Result<Value, ApiError> + Send + 'static,
) -> Result<Response<Body>, ApiError> {
    let serving = Arc::clone(app.serving()?);
    let (parts, body) = request.into_parts();
    let (body, ticket) = body::admit(&app, &serving, &parts.headers, body).await?;
    let bytes = body.len();
    let (pool, headers) = (Arc::clone(&app), FromHeaders::read(&parts.headers, &app.options.keys));
    let work = move || {
        let _ticket = ticket; // Counted until the work is done, also if the client leaves.
        let mut fields = Fields::of_body(Json::parse(&body)?)?;
        let value = work(&serving, &mut fields)?;
        Ok((value, ignored(&app, &fields)?))
    };
    let (value, ignored) = pool.text.run(bytes, work).await?;
    let mut response = json_response(value.to_string());
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
