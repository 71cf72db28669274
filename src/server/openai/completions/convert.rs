//! From a checked text completion request to token ids and a reply that waits for them.

use super::reply::{Echo, Reply};
use super::types::{CompletionRequest, Prompt};
use crate::engine_client::Ticket;
use crate::server::app::{App, Serving};
use crate::server::error::ApiError;
use crate::server::fields::Fields;
use crate::server::openai::exchange::{FromHeaders, Prepared, ReplyHead, ignored, unix_time};
use crate::server::openai::logprobs::Spelling;
use crate::server::openai::submit::{Extra, check_length, generate, text_error, truncate};
use protocol::Token;
use std::sync::Arc;

/// Output cap of a request that names none.
const MAX_TOKENS_DEFAULT: u32 = 16;

/// Reads, refuses, tokenises and submits.
pub(super) fn prepare(
    app: &App,
    serving: &Arc<Serving>,
    mut fields: Fields,
    headers: &FromHeaders,
    ticket: Ticket,
) -> Result<Prepared<Reply>, ApiError> {
    let request = CompletionRequest::take(&mut fields, &serving.bounds, &serving.defaults)?;
    let ignored = ignored(app, &fields)?;
    let mut params = request.params;
    let model = serving.check_model(params.model.as_deref())?;
    params.replica = headers.replica(params.replica, serving.bounds.replicas)?;
    let request_id = headers.name(&mut params, &app.random);

    let mut prompts = Vec::with_capacity(request.prompts.len());
    for prompt in &request.prompts {
        if let Prompt::Text(text) = prompt {
            check_length(serving, text, params.truncate, "prompt")?;
        }
        let mut ids = encode(serving, prompt, request.add_special_tokens)?;
        truncate(&mut ids, params.truncate);
        prompts.push(ids);
    }
    let echo = |(prompt, ids): (&Prompt, &Vec<Token>)| Echo {
        text: match prompt {
            Prompt::Text(text) if params.truncate.is_none() => text.clone(),
            _ => serving.tokenizer.decode(ids, params.skip_special),
        },
        ids: ids.clone(),
    };
    let keeps_ids = params.echo || params.return_token_ids;
    let echoes = if keeps_ids {
        request.prompts.iter().zip(&prompts).map(echo).collect()
    } else {
        Vec::new()
    };
    // An echoed prompt shows the log-probabilities of its tokens like those of the output.
    let of_echo = request.logprobs.filter(|_| params.echo);
    let extra = Extra {
        logprobs: request.logprobs,
        prompt_logprobs: params.prompt_logprobs.max(of_echo),
        max_tokens_default: Some(MAX_TOKENS_DEFAULT),
        prompt_field: "prompt",
        parser: None,
    };
    let generation = generate(app, serving, &params, &prompts, extra, ticket)?;
    let head = ReplyHead {
        id: format!("cmpl-{request_id}"),
        created: unix_time(),
        model,
        fingerprint: serving.card.fingerprint.clone(),
    };
    let as_ids = params.tokens_as_ids.unwrap_or(app.options.tokens_as_ids);
    let mut stream_options = params.stream_options;
    stream_options.include_usage |= app.options.force_usage;
    stream_options.continuous_usage |= app.options.force_usage;
    let reply = Reply {
        head,
        tokenizer: Arc::clone(&serving.tokenizer),
        spelling: if as_ids { Spelling::Id } else { Spelling::Text },
        logprobs: request.logprobs.is_some(),
        prompt_logprobs: params.prompt_logprobs.is_some(),
        echo: params.echo,
        return_token_ids: params.return_token_ids,
        echoes,
        n: params.n as usize,
        stream_options,
    };
    Ok(Prepared { generation, reply, stream: params.stream, request_id, ignored })
}

fn encode(
    serving: &Serving,
    prompt: &Prompt,
    add_special_tokens: bool,
) -> Result<Vec<Token>, ApiError> {
    match prompt {
        Prompt::Ids(ids) => Ok(ids.clone()),
        Prompt::Text(text) => {
            let encoded = serving.tokenizer.encode(text, add_special_tokens);
            encoded.map_err(|error| text_error(&error, "prompt"))
        }
    }
}
