//! From a checked text completion request to token ids and a reply that waits for them.

use super::reply::{Echo, Reply};
use super::types::{CompletionRequest, Prompt};
use crate::engine_client::Ticket;
use crate::server::app::{App, Serving};
use crate::server::error::ApiError;
use crate::server::fields::Fields;
use crate::server::openai::exchange::{FromHeaders, Prepared, ReplyHead, ignored};
use crate::server::openai::logprobs::TokenNames;
use crate::server::openai::params::{Params, Truncate};
use crate::server::openai::submit::{Extra, check_length, generate, text_error, truncate};
use protocol::Token;
use std::sync::Arc;

/// Output cap of a request that names none.
const MAX_TOKENS_DEFAULT: u32 = 16;

/// The field that holds the prompts.
const FIELD: &str = "prompt";

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

    let prompts = encode(serving, &request.prompts, request.add_special_tokens, params.truncate)?;
    let echoes = echoes(serving, &request.prompts, &prompts, &params);
    // An echoed prompt shows the log-probabilities of its tokens like those of the output.
    let of_echo = request.logprobs.filter(|_| params.echo);
    let extra = Extra {
        thinking: None,
        logprobs: request.logprobs,
        prompt_logprobs: params.prompt_logprobs.max(of_echo),
        max_tokens_default: Some(MAX_TOKENS_DEFAULT),
        prompt_field: FIELD,
        parser: None,
    };
    let generation = generate(app, serving, &params, &prompts, extra, ticket)?;
    let spelling = params.spelling(&app.options);
    let reply = Reply {
        head: ReplyHead::new("cmpl", &request_id, model, serving),
        tokens: TokenNames { tokenizer: Arc::clone(&serving.tokenizer), spelling },
        logprobs: request.logprobs.is_some(),
        prompt_logprobs: params.prompt_logprobs.is_some(),
        echo: params.echo,
        return_token_ids: params.return_token_ids,
        echoes,
        n: params.n as usize,
        stream_options: params.events(&app.options),
    };
    Ok(Prepared { generation, reply, stream: params.stream, request_id, ignored })
}

/// The ids of each prompt, cut where the request says.
fn encode(
    serving: &Serving,
    prompts: &[Prompt],
    add_special_tokens: bool,
    cut: Option<Truncate>,
) -> Result<Vec<Vec<Token>>, ApiError> {
    let ids = |prompt: &Prompt| {
        let mut ids = match prompt {
            Prompt::Ids(ids) => ids.clone(),
            Prompt::Text(text) => {
                check_length(serving, text, cut, FIELD)?;
                let encoded = serving.tokenizer.encode(text, add_special_tokens);
                encoded.map_err(|error| text_error(&error, FIELD))?
            }
        };
        truncate(&mut ids, cut);
        Ok(ids)
    };
    prompts.iter().map(ids).collect()
}

/// The prompts as the reply repeats them, if it does.
fn echoes(serving: &Serving, asked: &[Prompt], ids: &[Vec<Token>], params: &Params) -> Vec<Echo> {
    let echo = |(prompt, ids): (&Prompt, &Vec<Token>)| Echo {
        text: match prompt {
            Prompt::Text(text) if params.truncate.is_none() => text.clone(),
            _ => serving.tokenizer.decode(ids, params.skip_special),
        },
        ids: ids.as_slice().into(),
    };
    let repeats = params.echo || params.return_token_ids;
    asked.iter().zip(ids).filter(|_| repeats).map(echo).collect()
}
