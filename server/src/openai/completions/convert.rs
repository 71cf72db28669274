//! Parses and tokenises a text completion request and submits it to the engine.

use super::reply::{CompletionReplyFormatter, EchoedPrompt};
use super::types::{CompletionPrompt, CompletionRequest};
use crate::api_error::ApiError;
use crate::app::ServingContext;
use crate::openai::endpoint::{EndpointRequest, ReplyMetadata, SubmittedRequest, ignored_fields};
use crate::openai::params::CompletionParams;
use crate::openai::submit::{
    EndpointParams, reject_if_too_long, start_generation, text_error, truncate,
};
use protocol::Token;

/// Default of `max_tokens` for text completions, as in OpenAI's API.
pub(super) const MAX_TOKENS_DEFAULT: u32 = 16;

/// Name of the field that contains the prompts.
pub(super) const FIELD: &str = "prompt";

/// Parses, validates, tokenises and submits a text completion request.
pub(super) fn prepare(
    request: EndpointRequest<'_>,
) -> Result<SubmittedRequest<CompletionReplyFormatter>, ApiError> {
    let EndpointRequest { app, serving, mut fields, headers, permit } = request;
    let request =
        CompletionRequest::take(&mut fields, &serving.field_bounds, &serving.sampling_defaults)?;
    let ignored = ignored_fields(app, &fields)?;
    let mut params = request.params;
    let model = serving.check_model(params.model.as_deref())?;
    params.replica = headers.replica(params.replica, serving.field_bounds.replicas)?;
    let request_id = headers.request_id(&mut params, &app.id_generator);

    let prompts = encode(serving, &request.prompts, request.add_special_tokens, &params)?;
    let echoes = echoes(serving, &request.prompts, &prompts, &params);
    // The log-probabilities of an echoed prompt contain the same number of top tokens per position as the
    // log-probabilities of the output.
    let echo_logprobs = request.logprobs.filter(|_| params.echo);
    let extra = EndpointParams {
        thinking: None,
        logprobs: request.logprobs,
        prompt_logprobs: params.prompt_logprobs.max(echo_logprobs),
        max_tokens_default: Some(MAX_TOKENS_DEFAULT),
        prompt_field: FIELD,
        parser: None,
    };
    let generation = start_generation(app, serving, &params, &prompts, extra, permit)?;
    let reply = CompletionReplyFormatter {
        head: ReplyMetadata::new("cmpl", &request_id, model, serving),
        tokens: params.token_formatter(serving, &app.options),
        logprobs: request.logprobs.is_some(),
        prompt_logprobs: params.prompt_logprobs.is_some(),
        echo: params.echo,
        return_token_ids: params.return_token_ids,
        echoes,
        n: params.n as usize,
        stream_options: params.effective_stream_options(&app.options),
    };
    Ok(SubmittedRequest { generation, reply, stream: params.stream, request_id, ignored })
}

/// Returns the token ids of each prompt, truncated if the request sets `truncate_prompt_tokens`.
pub(super) fn encode(
    serving: &ServingContext,
    prompts: &[CompletionPrompt],
    add_special_tokens: bool,
    params: &CompletionParams,
) -> Result<Vec<Vec<Token>>, ApiError> {
    let ids = |prompt: &CompletionPrompt| {
        let mut ids = match prompt {
            CompletionPrompt::Ids(ids) => ids.clone(),
            CompletionPrompt::Text(text) => {
                reject_if_too_long(serving, text, params, FIELD)?;
                let encoded = serving.tokenizer.encode(text, add_special_tokens);
                encoded.map_err(|error| text_error(&error, FIELD))?
            }
        };
        truncate(&mut ids, params.truncate);
        Ok(ids)
    };
    prompts.iter().map(ids).collect()
}

/// Returns the text and token ids of each prompt if the reply contains them (`echo`, `return_token_ids`),
/// else an empty list.
fn echoes(
    serving: &ServingContext,
    prompts: &[CompletionPrompt],
    ids: &[Vec<Token>],
    params: &CompletionParams,
) -> Vec<EchoedPrompt> {
    let echo = |(prompt, ids): (&CompletionPrompt, &Vec<Token>)| EchoedPrompt {
        text: match prompt {
            CompletionPrompt::Text(text) if params.truncate.is_none() => text.clone(),
            _ => serving.tokenizer.decode(ids, params.skip_special),
        },
        ids: ids.as_slice().into(),
    };
    let is_needed = params.echo || params.return_token_ids;
    prompts.iter().zip(ids).filter(|_| is_needed).map(echo).collect()
}
