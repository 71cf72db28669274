//! Endpoint `/generate`: submits the request as a text completion and writes the reply in SGLang's format.

use super::generate_fields::{GenerateRequest, rename_field};
use super::generate_output::{GenerateMeta, GenerateOutput, prompt_members};
use crate::api_error::ApiError;
use crate::app::{AppState, ServingContext};
use crate::openai::choice::ChoiceDelta;
use crate::openai::collect::collect;
use crate::openai::completions;
use crate::openai::endpoint::{
    EndpointRequest, InferenceEndpoint, SubmittedRequest, ignored_fields,
};
use crate::openai::generation::RequestGeneration;
use crate::sse::SseEventWriter;
use axum::body::Body;
use bytes::{BufMut, BytesMut};
use protocol::Token;
use std::sync::Arc;
use std::time::Instant;

/// Formats the reply to a `/generate` request; contains all values that the reply needs in addition to the
/// generated tokens.
pub(super) struct GenerateReplyFormatter {
    meta: GenerateMeta,
    /// Token ids of each prompt if the reply contains prompt log-probabilities, else empty.
    prompts: Vec<Arc<[Token]>>,
    n: usize,
}

/// Counts the unknown sampling parameters `names`.
///
/// Errors: HTTP status 400 if the server is strict and there are any.
fn count_ignored(
    app: &AppState,
    serving: &ServingContext,
    names: &[String],
) -> Result<(), ApiError> {
    if let (true, Some(name)) = (app.options.strict_fields, names.first()) {
        return Err(ApiError::unsupported(name.clone(), "unknown field"));
    }
    serving.metrics.http.ignored(names.len());
    Ok(())
}

impl InferenceEndpoint for GenerateReplyFormatter {
    type StreamWriter = GenerateChunkWriter;

    fn prepare(request: EndpointRequest<'_>) -> Result<SubmittedRequest<Self>, ApiError> {
        let EndpointRequest { app, serving, mut fields, headers, permit } = request;
        let received = Instant::now();
        let request = GenerateRequest::take(&mut fields)?;
        let mut ignored = ignored_fields(app, &fields)?;
        count_ignored(app, serving, &request.ignored)?;
        ignored.extend(request.ignored);
        let field = request.prompt_field;
        let fields = request.completion;
        let submitted =
            completions::submit(EndpointRequest { app, serving, fields, headers, permit });
        let mut submitted = submitted.map_err(|error| rename_field(error, field))?;
        submitted.generation.rename_fields(field, "sampling_params.max_new_tokens");
        let meta = GenerateMeta {
            request_id: submitted.request_id.clone(),
            weight_version: serving.card.fingerprint.clone(),
            is_batch: request.is_batch,
            logprobs: request.logprobs,
            tokens: submitted.tokens,
            received,
        };
        let reply = Self { meta, prompts: submitted.prompts, n: submitted.n };
        Ok(SubmittedRequest {
            generation: submitted.generation,
            reply,
            stream: submitted.stream,
            request_id: submitted.request_id,
            ignored,
        })
    }

    fn stream_writer(self) -> GenerateChunkWriter {
        GenerateChunkWriter { reply: self, outputs: Vec::new() }
    }

    async fn collect(self, generation: RequestGeneration) -> Result<Body, ApiError> {
        let (choices, generation) = collect(generation).await?;
        let mut texts = Vec::with_capacity(choices.len());
        for (index, choice) in choices.into_iter().enumerate() {
            let prompt = self.prompts.get(index / self.n).map_or(&[][..], |ids| &**ids);
            let prompt_logprobs = prompt_members(&self.meta, prompt, &choice.prompt_logprobs);
            let mut output = GenerateOutput::ended(choice.text, choice.tokens, choice.end);
            output.push_logprobs(&self.meta, &choice.logprobs);
            let usage = generation.choice_usage(index);
            texts.push(output.json(&self.meta, index, &usage, &prompt_logprobs));
        }
        let text = texts.join(",");
        Ok(Body::from(if self.meta.is_batch { format!("[{text}]") } else { text }))
    }
}

/// Writes the events of a streaming `/generate` reply. Each event contains the whole output so far.
pub(super) struct GenerateChunkWriter {
    reply: GenerateReplyFormatter,
    outputs: Vec<GenerateOutput>,
}

impl SseEventWriter for GenerateChunkWriter {
    fn delta(
        &mut self,
        choice: u32,
        delta: &ChoiceDelta,
        generation: &RequestGeneration,
        out: &mut BytesMut,
    ) {
        let (index, meta) = (choice as usize, &self.reply.meta);
        if self.outputs.len() <= index {
            self.outputs.resize_with(index + 1, GenerateOutput::default);
        }
        let output = &mut self.outputs[index];
        output.text.push_str(&delta.text);
        output.ids.extend_from_slice(&delta.tokens);
        output.push_logprobs(meta, &delta.logprobs);
        output.end.clone_from(&delta.end);
        let usage = generation.choice_usage(index);
        let prompt_logprobs = prompt_members(meta, &[], &[]);
        out.put_slice(b"data: ");
        out.put_slice(output.json(meta, index, &usage, &prompt_logprobs).as_bytes());
        out.put_slice(b"\n\n");
    }

    fn end(&mut self, _generation: &RequestGeneration, _out: &mut BytesMut) {}
}
