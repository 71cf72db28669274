//! Submits validated chat and text completion requests to the engine.

mod constrained_submit;
mod prompt_length;
mod submit_errors;

use super::choice::{ChoiceState, ChoiceStopParams};
use super::generation::{PromptInfo, RequestGeneration};
use super::memory_reservation::{RequestMemoryEstimate, RequestTokenCounts, reserve};
use super::params::CompletionParams;
use super::thinking_budget::ActiveThinkingBudget;
use crate::api_error::ApiError;
use crate::app::{AppState, ServingContext};
use crate::request_ids::sampling_key;
use crate::request_spans::{SpanGenerationParams, SpanSamplingParams};
use constrained_submit::submit_constrained;
use engine::AdmissionPermit;
use grammar::DecodingGuide;
pub(crate) use prompt_length::{check_prompt_len, max_tokens, reject_if_too_long, truncate};
use protocol::{Replica, RequestId, Token};
use scheduler::{ExtraKeys, RequestSubmission};
use std::sync::Arc;
pub(crate) use submit_errors::text_error;
use text::{DetokenizeOptions, Detokenizer, OutputParser, StopStrings};

/// Maximum number of choices of one HTTP request (number of prompts × `n`).
const CHOICES_MAX: usize = 256;

/// Parameters that depend on the endpoint, in addition to the fields shared by all endpoints.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EndpointParams<'a> {
    /// Number of top-k log-probabilities per output token.
    pub logprobs: Option<u32>,
    /// Number of top-k log-probabilities per prompt token.
    pub prompt_logprobs: Option<u32>,
    /// Default of `max_tokens`; `None` = the rest of the context length.
    pub max_tokens_default: Option<u32>,
    /// Name of the field that contains the prompt.
    pub prompt_field: &'static str,
    /// Output parser, and the special tokens whose text the parser needs.
    pub parser: Option<(&'a OutputParser, &'a Arc<[Token]>)>,
    /// Thinking budget of the outputs; `None` = no budget.
    pub thinking: Option<&'a ActiveThinkingBudget>,
}

/// Submits `params.n` requests to the engine for each prompt. Must not run on the async runtime, because it
/// hashes the prompts.
///
/// Errors: HTTP status 400 for an invalid parameter or an exceeded limit, 429 or 503 for overload.
pub(crate) fn start_generation(
    app: &AppState,
    serving: &ServingContext,
    params: &CompletionParams,
    prompts: &[Vec<Token>],
    extra: EndpointParams<'_>,
    mut permit: AdmissionPermit,
) -> Result<RequestGeneration, ApiError> {
    let n = params.n as usize;
    // The number of prompts of a pooling request is already limited by its parser, so here only the queue
    // limits it.
    let is_pooling = params.sampling.pooling.is_some();
    if prompts.len() * n > CHOICES_MAX && !is_pooling {
        let message = format!(
            "{} prompts with n = {n} exceed the limit of {CHOICES_MAX} choices",
            prompts.len()
        );
        return Err(ApiError::invalid("n", message));
    }
    let queued = if is_pooling { EngineRequestKind::Texts } else { EngineRequestKind::Choices };
    check_queue(prompts.len() * n, &permit, queued, extra.prompt_field)?;
    let template = template(serving, params, extra)?;
    let limit = |prompt: &Vec<Token>| max_tokens(serving, params, prompt.len(), extra);
    let max_tokens: Vec<u32> = prompts.iter().map(limit).collect::<Result<_, _>>()?;
    let counts = RequestTokenCounts {
        requests: (prompts.len() * n) as u64,
        prompt_tokens: prompts.iter().map(|prompt| prompt.len() as u64).sum::<u64>() * n as u64,
        output_tokens: max_tokens.iter().map(|&limit| u64::from(limit)).sum::<u64>() * n as u64,
    };
    // The memory is reserved before anything is allocated, because a short body may request many copies of a
    // long prompt.
    let admitted = permit.grow(counts.requests, counts.prompt_tokens);
    admitted.map_err(|overload| app.overloaded(&overload))?;
    let request_bytes = RequestMemoryEstimate::of(serving, params, &template, counts);
    let field = request_bytes.field(extra.prompt_field, params.max_tokens_field);
    reserve(app, &mut permit, request_bytes.total(), field)?;
    let seed = || params.seed.map_or_else(|| app.id_generator.next_u64(), |seed| seed as u64);
    let submissions = build_submissions(&template, prompts, &max_tokens, n as u64, seed);
    let stops = StopStrings::new(&params.stop, params.include_stop);
    let rules = ChoiceStopParams {
        min_tokens: params.sampling.min_tokens,
        include_stop: params.include_stop,
    };
    let choice = |_| {
        let detokenizer =
            detokenizer(serving, params, extra.parser.map(|(_, visible_special)| visible_special));
        let parser = extra.parser.map(|(parser, _)| parser.clone());
        ChoiceState::new(detokenizer, stops.matcher(), rules, parser)
    };
    let choices = (0..submissions.len()).map(choice).collect();
    let prompt_info = PromptInfo {
        tokens: prompts.iter().map(|p| p.len() as u32).collect(),
        block_tokens: serving.block_tokens,
        details: app.options.usage_details,
        field: extra.prompt_field,
        max_tokens_field: params.max_tokens_field,
        ids: match &app.options.tracer {
            Some(tracer) if tracer.with_ids => prompts.to_vec(),
            _ => Vec::new(),
        },
    };
    let name = params.request_id.as_deref().unwrap_or_default();
    let budget = extra.thinking.map(|thinking| thinking.budget.clone());
    let stream = match (&params.constraint, budget) {
        (None, None) => serving.client.submit(submissions, params.n, name, permit),
        (None, budget) => {
            let (stream, deferred) =
                serving.client.submit_deferred(submissions, params.n, name, permit);
            deferred.release(&DecodingGuide { grammar: None, budget });
            stream
        }
        (Some(constraint), budget) => {
            let constraint = Arc::clone(constraint);
            submit_constrained(serving, params, constraint, budget, submissions, permit)
        }
    };
    let mut generation =
        RequestGeneration::new(stream, choices, n, prompt_info, params.stream_interval);
    if let Some(options) = app.options.spec_decode_metrics {
        generation.count_drafts(options);
    }
    if app.options.spans.is_some() {
        generation.set_span_parameters(span_parameters(serving, params));
    }
    Ok(generation)
}

/// Returns the parameters shown in the request's span.
fn span_parameters(serving: &ServingContext, params: &CompletionParams) -> SpanGenerationParams {
    let model = params.model.as_deref().unwrap_or_else(|| serving.card.names.first());
    SpanGenerationParams {
        model: model.to_owned(),
        request_id: params.request_id.clone().unwrap_or_default(),
        stream: params.stream,
        sampling: params.sampling.pooling.is_none().then(|| span_sampling(params)),
    }
}

/// Returns the sampling parameters shown in the request's span.
fn span_sampling(params: &CompletionParams) -> SpanSamplingParams {
    let sampling = &params.sampling;
    SpanSamplingParams {
        n: params.n,
        max_tokens: params.max_tokens,
        temperature: sampling.temperature,
        top_p: sampling.top_p,
        top_k: sampling.top_k,
        frequency_penalty: sampling.frequency_penalty,
        presence_penalty: sampling.presence_penalty,
        seed: params.seed,
        stop: params.stop.clone(),
    }
}

/// Kind of engine requests that one HTTP request is split into, for error messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum EngineRequestKind {
    /// One engine request per choice (`n`) of each prompt.
    Choices,
    /// One engine request per text of a pooling request.
    Texts,
}

/// Rejects a request with more engine requests than the capacity of the server's queue, because it could
/// never be accepted. `prompt_field` is the name of the field that contains the prompts.
fn check_queue(
    count: usize,
    permit: &AdmissionPermit,
    unit: EngineRequestKind,
    prompt_field: &str,
) -> Result<(), ApiError> {
    let cap = permit.requests_max();
    if count as u64 <= cap {
        return Ok(());
    }
    let limit = format!("the server queues at most {cap} (--max-num-queued-reqs)");
    match unit {
        EngineRequestKind::Choices => {
            let message = format!("prompts × n is {count} choices, {limit}");
            Err(ApiError::invalid("n", message))
        }
        EngineRequestKind::Texts => {
            Err(ApiError::invalid(prompt_field, format!("the request has {count} texts, {limit}")))
        }
    }
}

/// Creates one engine submission per choice of each prompt. `max_tokens_by_prompt` contains the maximum
/// number of output tokens for each prompt.
fn build_submissions(
    template: &RequestSubmission,
    prompts: &[Vec<Token>],
    max_tokens_by_prompt: &[u32],
    n: u64,
    seed: impl Fn() -> u64,
) -> Vec<RequestSubmission> {
    let mut submissions = Vec::with_capacity(prompts.len() * n as usize);
    for (prompt, &max_tokens) in prompts.iter().zip(max_tokens_by_prompt) {
        let seed = seed();
        submissions.extend((0..n).map(|choice| {
            let (tokens, key) = (prompt.clone(), sampling_key(seed, choice));
            RequestSubmission { tokens, max_tokens, rng_key: key, ..template.clone() }
        }));
    }
    submissions
}

/// Creates the detokenizer of one output; `visible_special` lists special tokens that are kept in the text.
pub(crate) fn detokenizer(
    serving: &ServingContext,
    params: &CompletionParams,
    visible_special: Option<&Arc<[Token]>>,
) -> Detokenizer {
    let options = DetokenizeOptions { skip_special_tokens: params.skip_special, continues: true };
    let detokenizer = Detokenizer::new(serving.tokenizer.clone(), options);
    match visible_special {
        Some(visible_special) => detokenizer.with_visible_special(Arc::clone(visible_special)),
        None => detokenizer,
    }
}

/// Builds the engine submission that is cloned for each choice.
fn template(
    serving: &ServingContext,
    params: &CompletionParams,
    extra: EndpointParams<'_>,
) -> Result<RequestSubmission, ApiError> {
    let mut sampling = params.sampling.clone();
    sampling.logprobs = extra.logprobs;
    sampling.prompt_logprobs = extra.prompt_logprobs;
    sampling.bad_words = bad_words(serving, params)?;
    // With `ignore_eos`, a grammar allows EOS only where the output must end. So EOS tokens end constrained
    // outputs even with `ignore_eos`.
    let constrained = params.constraint.is_some();
    let allows_eos = !params.ignore_eos || constrained;
    let eos_ids = if allows_eos { serving.tokenizer.eos_ids().to_vec() } else { Vec::new() };
    if let Some(thinking) = extra.thinking {
        thinking.check(&sampling, &params.stop_ids)?;
    }
    // The sampler masks these token ids until `min_tokens` tokens are generated.
    sampling.stop_token_ids.clone_from(&params.stop_ids);
    sampling.stop_token_ids.extend(&eos_ids);
    Ok(RequestSubmission {
        id: RequestId(0),
        tokens: Vec::new(),
        max_tokens: 0,
        sampling,
        first_masked_token: if constrained {
            Some(0)
        } else {
            extra.thinking.map(|thinking| thinking.budget.tokens)
        },
        rng_key: 0,
        eos_ids,
        stop_ids: params.stop_ids.clone(),
        priority: params.priority,
        extra_keys: ExtraKeys::salted(params.cache_salt.clone()),
        replica: params.replica.map(Replica),
        block_keys: Vec::new(),
    })
}

/// Returns the token sequences of the bad words: each word as given and, where this yields another first
/// token and the same number of tokens, with a leading space.
fn bad_words(
    serving: &ServingContext,
    params: &CompletionParams,
) -> Result<Vec<Vec<Token>>, ApiError> {
    let encode =
        |text: &str| serving.tokenizer.encode(text, false).map_err(|e| text_error(&e, "bad_words"));
    let mut words = Vec::with_capacity(2 * params.bad_words.len());
    for word in &params.bad_words {
        let plain = encode(word)?;
        let spaced = encode(&format!(" {}", word.trim_start()))?;
        let differs = spaced.first() != plain.first() && spaced.len() == plain.len();
        words.extend([Some(plain), Some(spaced).filter(|_| differs)].into_iter().flatten());
    }
    words.retain(|ids| !ids.is_empty());
    Ok(words)
}
