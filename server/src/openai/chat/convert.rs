//! Parses a chat completion request and submits it to the engine.

use super::generation_start::{StartedGeneration, start};
use super::ignored_values::report_ignored;
use super::reply::ChatCompletionReplyFormatter;
use super::types::ChatCompletionRequest;
use crate::api_error::ApiError;
use crate::openai::endpoint::{EndpointRequest, ReplyMetadata, SubmittedRequest, ignored_fields};

/// Parses, validates and submits a chat completion request.
pub(super) fn prepare(
    request: EndpointRequest<'_>,
) -> Result<SubmittedRequest<ChatCompletionReplyFormatter>, ApiError> {
    let EndpointRequest { app, serving, mut fields, headers, permit } = request;
    let request = ChatCompletionRequest::take(
        &mut fields,
        &serving.field_bounds,
        &serving.sampling_defaults,
    )?;
    let include_reasoning = fields.bool("include_reasoning")?.unwrap_or(true);
    let mut ignored = ignored_fields(app, &fields)?;
    report_ignored(app, serving, &request, &mut ignored)?;
    let logprobs = request.logprobs.is_some();
    let custom_tools = request.tools.custom.clone();
    let StartedGeneration { generation, model, request_id, params, prompt, echo, tool_call_ids } =
        start(app, serving, request, headers, permit)?;
    let reply = ChatCompletionReplyFormatter {
        head: ReplyMetadata::new("chatcmpl", &request_id, model, serving),
        tokens: params.token_formatter(serving, &app.options),
        logprobs,
        prompt_logprobs: params.prompt_logprobs.is_some(),
        echo,
        prompt_ids: params.return_token_ids.then_some(prompt),
        stream_options: params.effective_stream_options(&app.options),
        tool_call_ids,
        custom_tools,
        reasoning: include_reasoning.then_some(app.options.reasoning_field),
    };
    Ok(SubmittedRequest { generation, reply, stream: params.stream, request_id, ignored })
}
