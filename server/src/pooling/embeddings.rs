//! POST `/v1/embeddings`: parses the request, submits its prompts and returns their embeddings.

use super::embedding_reply::{EmbeddingWriter, EncodingFormat};
use super::{NoStreamWriter, PROMPTS_MAX, PoolingTask, prompts, vectors};
use crate::api_error::ApiError;
use crate::app::ServingContext;
use crate::openai::chat::messages::reject_media;
use crate::openai::collect::collect;
use crate::openai::completions::{CompletionPrompt, take_prompts};
use crate::openai::endpoint::{
    EndpointRequest, InferenceEndpoint, ReplyMetadata, SubmittedRequest, ignored_fields,
};
use crate::openai::generation::RequestGeneration;
use crate::openai::params::{CompletionParams, FieldBounds};
use crate::openai::pooling_params::{self, submit_pooling};
use crate::openai::submit::truncate;
use crate::piece_body::body_of;
use crate::request_fields::RequestFields;
use crate::strict_json::JsonValue;
use axum::body::Body;
use protocol::Token;

/// Name of the field that contains the prompts.
const FIELD: &str = "input";

/// Validated embedding request.
pub(super) struct EmbeddingRequest {
    params: CompletionParams,
    prompts: Vec<CompletionPrompt>,
    format: EncodingFormat,
    dimensions: Option<u32>,
    add_special_tokens: bool,
    use_activation: Option<bool>,
}

impl EmbeddingRequest {
    /// Parses all fields of an embedding request.
    ///
    /// Errors: HTTP status 400; the error names the invalid field.
    pub(super) fn take(fields: &mut RequestFields, bounds: &FieldBounds) -> Result<Self, ApiError> {
        let params = pooling_params::take(fields, bounds)?;
        if let Some(messages) = fields.take("messages") {
            reject_media_parts(&messages)?;
            let message = "conversations are not embedded; send the text of the prompt as `input`";
            return Err(ApiError::unsupported("messages", message));
        }
        Ok(Self {
            params,
            prompts: take_prompts(fields, FIELD, PROMPTS_MAX, bounds)?,
            format: EncodingFormat::take(fields)?,
            dimensions: fields.int("dimensions", 1..=i64::from(u32::MAX))?.map(|n| n as u32),
            add_special_tokens: fields.bool("add_special_tokens")?.unwrap_or(true),
            use_activation: pooling_params::take_activation(fields)?,
        })
    }

    /// Returns the token ids of each prompt, truncated if the request sets a truncation.
    fn encode(&self, serving: &ServingContext) -> Result<Vec<Vec<Token>>, ApiError> {
        let (special, params) = (self.add_special_tokens, &self.params);
        let ids = |prompt: &CompletionPrompt| match prompt {
            CompletionPrompt::Text(text) => prompts::encode(serving, text, special, params, FIELD),
            CompletionPrompt::Ids(ids) => {
                let mut ids = ids.clone();
                truncate(&mut ids, params.truncate);
                Ok(ids)
            }
        };
        self.prompts.iter().map(ids).collect()
    }
}

/// Rejects parts of messages that are not text.
///
/// Errors: HTTP status 400; the error names the place of the part and its kind.
fn reject_media_parts(messages: &JsonValue) -> Result<(), ApiError> {
    let JsonValue::List(messages) = messages else { return Ok(()) };
    for (m, message) in messages.iter().enumerate() {
        let Some(JsonValue::List(parts)) = member(message, "content") else { continue };
        for (p, part) in parts.iter().enumerate() {
            if let Some(JsonValue::Str(kind)) = member(part, "type") {
                reject_media(kind, &format!("messages[{m}].content[{p}]"))?;
            }
        }
    }
    Ok(())
}

fn member<'a>(object: &'a JsonValue, name: &str) -> Option<&'a JsonValue> {
    let JsonValue::Object(pairs) = object else { return None };
    pairs.iter().find(|(key, _)| key == name).map(|(_, value)| value)
}

/// Formats the reply to an embedding request; contains all values that the reply needs in addition to the
/// pooled vectors.
pub(super) struct EmbeddingReplyFormatter {
    head: ReplyMetadata,
    format: EncodingFormat,
    dimensions: usize,
    normalise: bool,
}

impl InferenceEndpoint for EmbeddingReplyFormatter {
    type StreamWriter = NoStreamWriter;

    fn prepare(request: EndpointRequest<'_>) -> Result<SubmittedRequest<Self>, ApiError> {
        let EndpointRequest { app, serving, mut fields, headers, permit } = request;
        let mut request = EmbeddingRequest::take(&mut fields, &serving.field_bounds)?;
        let ignored = ignored_fields(app, &fields)?;
        let pooler = serving.pooler()?;
        if pooler.task != PoolingTask::Embed {
            let message =
                "the model scores text pairs and has no embeddings; use /score or /rerank";
            return Err(ApiError::bad_request("no_embeddings", "model", message));
        }
        let model = serving.check_model(request.params.model.as_deref())?;
        let dimensions = pooler.dimensions(request.dimensions)?;
        // The pooling method must be set before tokenisation, because the prompt length limit depends on it:
        // pooling needs no room for output tokens.
        request.params.sampling.pooling = Some(pooler.method.clone());
        let prompts = request.encode(serving)?;
        let params = &mut request.params;
        let request_id = headers.pooling_request_id(params, serving, app)?;
        let generation = submit_pooling(app, serving, params, &prompts, FIELD, permit)?;
        let reply = Self {
            head: ReplyMetadata::new("embd", &request_id, model, serving),
            format: request.format,
            dimensions,
            normalise: request.use_activation.unwrap_or(pooler.use_activation),
        };
        Ok(SubmittedRequest { generation, reply, stream: false, request_id, ignored })
    }

    fn stream_writer(self) -> NoStreamWriter {
        unreachable!("pooling replies are not streamed")
    }

    async fn collect(self, generation: RequestGeneration) -> Result<Body, ApiError> {
        let (choices, mut generation) = collect(generation).await?;
        let vector = |index| {
            vectors::embedding(generation.take_pooled(index), self.dimensions, self.normalise)
        };
        let vectors = (0..choices.len()).map(vector).collect();
        let writer = EmbeddingWriter::new(&self.head, vectors, self.format, generation.usage());
        Ok(body_of(writer, generation.into_memory_reservation()))
    }
}
