//! Parses the request fields shared by chat and text completions: checks types and ranges, and sets defaults.

mod request_options;
mod sampling_fields;

use super::logprobs::{TokenFormat, TokenFormatter};
use super::{structured_outputs, unsupported_fields};
use crate::api_error::ApiError;
use crate::app::{ServerOptions, ServingContext};
use crate::request_fields::RequestFields;
use grammar::OutputConstraint;
use protocol::{SamplingParams, Token};
pub(crate) use request_options::is_request_id;
use request_options::stream_options;
pub(super) use request_options::{cache_salt, priority, request_id, truncation};
use sampling_fields::{ids, sampling, stop_strings};
use std::sync::Arc;

/// Ranges of request fields, as far as they depend on the model or the command line.
#[derive(Debug, Clone)]
pub struct FieldBounds {
    /// Vocabulary size; valid token ids are smaller.
    pub vocab_size: u32,
    /// Maximum number of prompt tokens and output tokens in total.
    pub max_model_len: u32,
    /// Maximum number of log-probabilities per token (`--max-logprobs`); `None` = the whole vocabulary.
    pub logprobs_max: Option<u32>,
    /// Number of replicas (DP ranks).
    pub replicas: u16,
    /// Whether requests may set `priority` (`--scheduling-policy priority`).
    pub priorities: bool,
}

/// Default sampling parameters: from `generation_config.json`, or neutral values.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingDefaults {
    /// Softmax temperature.
    pub temperature: f32,
    /// Top-p (nucleus) threshold.
    pub top_p: f32,
    /// Top-k; 0 = off.
    pub top_k: u32,
    /// Min-p; 0 = off.
    pub min_p: f32,
    /// Repetition penalty; 1 = off.
    pub repetition: f32,
}

impl Default for SamplingDefaults {
    fn default() -> Self {
        let (temperature, top_p, repetition) = (1.0, 1.0, 1.0);
        Self { temperature, top_p, top_k: 0, min_p: 0.0, repetition }
    }
}

/// Value of the request field `stream_options`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct StreamOptions {
    /// Whether the stream ends with a chunk that contains `usage`.
    pub include_usage: bool,
    /// Whether every chunk contains `usage` (`continuous_usage_stats`).
    pub continuous_usage: bool,
}

/// How a prompt is truncated: which end is kept, and the maximum number of tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PromptTruncation {
    /// The last tokens are kept, at most this number.
    KeepLast(u32),
    /// The first tokens are kept, at most this number.
    KeepFirst(u32),
}

/// Validated parameters shared by chat and text completions.
#[derive(Debug, Clone)]
pub(crate) struct CompletionParams {
    /// Model name in the request.
    pub model: Option<String>,
    /// Sampling parameters, except stop token ids, bad words and log-probabilities, which also depend on the
    /// tokenizer or the endpoint.
    pub sampling: SamplingParams,
    /// Structured output constraint. If the request sets none, a chat request may later set one to force tool
    /// calls.
    pub constraint: Option<Arc<OutputConstraint>>,
    /// Number of choices per prompt.
    pub n: u32,
    /// Seed of the sampling random number generator; `None` = a random seed.
    pub seed: Option<i64>,
    /// Maximum number of output tokens; `None` if the request sets no limit.
    pub max_tokens: Option<u32>,
    /// Name of the field that set `max_tokens`, or that error messages suggest.
    pub max_tokens_field: &'static str,
    /// Stop strings (`stop`).
    pub stop: Vec<String>,
    /// Whether the output includes the stop string (`include_stop_str_in_output`).
    pub include_stop: bool,
    /// Stop token ids (`stop_token_ids`).
    pub stop_ids: Vec<Token>,
    /// Whether EOS tokens do not end the output.
    pub ignore_eos: bool,
    /// Whether special tokens are omitted from the text.
    pub skip_special: bool,
    /// Strings that must not be generated (`bad_words`).
    pub bad_words: Vec<String>,
    /// Number of top-k log-probabilities per prompt token; `None` = no prompt log-probabilities.
    pub prompt_logprobs: Option<u32>,
    /// Whether the output is preceded by the prompt (text completions) or by the last message (chat).
    pub echo: bool,
    /// Whether the reply is a stream of SSE events.
    pub stream: bool,
    /// Value of the request field `stream_options`.
    pub stream_options: StreamOptions,
    /// Minimum number of tokens per SSE event (`stream_interval`).
    pub stream_interval: u32,
    /// Truncation of prompts that are too long (`truncate_prompt_tokens`).
    pub truncate: Option<PromptTruncation>,
    /// Salt of the KV block hashes: requests with different salts do not share cached KV blocks.
    pub cache_salt: Option<String>,
    /// Request id that the client has set in the body.
    pub request_id: Option<String>,
    /// Scheduling priority; requests with lower values are scheduled first.
    pub priority: i32,
    /// Replica (DP rank) that the request must run on.
    pub replica: Option<u16>,
    /// Whether the reply contains token ids in addition to text.
    pub return_token_ids: bool,
    /// Whether log-probabilities show tokens as `token_id:N`; `None` = the server's default.
    pub tokens_as_ids: Option<bool>,
}

/// Maximum number of choices per prompt, as in OpenAI's API.
const N_MAX: i64 = 128;
const STRING_BYTES_MAX: usize = 256;
const BAD_WORDS_MAX: usize = 64;
const STOP_IDS_MAX: usize = 128;

impl CompletionParams {
    /// Parses the fields shared by chat and text completions.
    ///
    /// Errors: HTTP status 400; the error names the first invalid field.
    pub(crate) fn take(
        fields: &mut RequestFields,
        bounds: &FieldBounds,
        defaults: &SamplingDefaults,
    ) -> Result<Self, ApiError> {
        unsupported_fields::reject_shared(fields)?;
        let sampling = sampling(fields, bounds, defaults)?;
        let stream = fields.bool("stream")?.unwrap_or(false);
        let prompt_logprobs = count_of_logprobs(fields, "prompt_logprobs", bounds)?;
        if stream && prompt_logprobs.is_some() {
            let message = "prompt_logprobs cannot be streamed";
            return Err(ApiError::invalid("prompt_logprobs", message));
        }
        let n = fields.int("n", 1..=N_MAX)?.unwrap_or(1) as u32;
        unsupported_fields::reject_best_of(fields, n)?;
        Ok(Self {
            model: fields.string("model", 512)?,
            constraint: structured_outputs::take(fields)?.map(Arc::new),
            n,
            seed: fields.int("seed", i64::MIN..=i64::MAX)?,
            max_tokens: None,
            max_tokens_field: "max_tokens",
            stop: stop_strings(fields)?,
            include_stop: fields.bool("include_stop_str_in_output")?.unwrap_or(false),
            stop_ids: ids(fields, "stop_token_ids", STOP_IDS_MAX, bounds)?.unwrap_or_default(),
            ignore_eos: fields.bool("ignore_eos")?.unwrap_or(false),
            skip_special: fields.bool("skip_special_tokens")?.unwrap_or(true),
            bad_words: {
                // The field has no effect, because no supported detokenizer inserts spaces between special
                // tokens.
                fields.bool("spaces_between_special_tokens")?;
                fields.strings("bad_words", STRING_BYTES_MAX, BAD_WORDS_MAX)?.unwrap_or_default()
            },
            prompt_logprobs,
            echo: fields.bool("echo")?.unwrap_or(false),
            stream,
            stream_options: stream_options(fields, stream)?,
            stream_interval: fields.int("stream_interval", 1..=1_000_000)?.unwrap_or(1) as u32,
            // The value −1 keeps the maximum number of prompt tokens for which one output token still fits
            // into the context length.
            truncate: truncation(
                fields,
                bounds,
                PromptTruncation::KeepLast,
                bounds.max_model_len.saturating_sub(1),
            )?,
            cache_salt: cache_salt(fields)?,
            request_id: request_id(fields)?,
            priority: priority(fields, bounds)?,
            replica: fields
                .int("data_parallel_rank", 0..=i64::from(bounds.replicas) - 1)?
                .map(|rank| rank as u16),
            return_token_ids: fields.bool("return_token_ids")?.unwrap_or(false),
            tokens_as_ids: fields.bool("return_tokens_as_token_ids")?,
            sampling,
        })
    }

    /// Returns the stream options of the request, with `usage` in every chunk if
    /// `--enable-force-include-usage` is set.
    pub(crate) fn effective_stream_options(&self, options: &ServerOptions) -> StreamOptions {
        let StreamOptions { include_usage, continuous_usage } = self.stream_options;
        StreamOptions {
            include_usage: include_usage || options.force_usage,
            continuous_usage: continuous_usage || options.force_usage,
        }
    }

    /// Returns the formatter of tokens in log-probabilities.
    pub(crate) fn token_formatter(
        &self,
        serving: &ServingContext,
        options: &ServerOptions,
    ) -> TokenFormatter {
        let as_ids = self.tokens_as_ids.unwrap_or(options.tokens_as_ids);
        let token_format = if as_ids { TokenFormat::Id } else { TokenFormat::Text };
        TokenFormatter { tokenizer: Arc::clone(&serving.tokenizer), token_format }
    }

    /// Sets the output constraint from a field that only one API has, such as `text.format` in a Responses
    /// request.
    ///
    /// Errors: HTTP status 400 if the request already has another constraint.
    pub(crate) fn add_constraint(
        &mut self,
        constraint: Option<OutputConstraint>,
    ) -> Result<(), ApiError> {
        let Some(constraint) = constraint else { return Ok(()) };
        if self.constraint.is_some() {
            let message = "the request already has another constraint";
            return Err(ApiError::invalid(constraint.param, message));
        }
        self.constraint = Some(Arc::new(constraint));
        Ok(())
    }

    /// Rejects parameters that are not supported by endpoints whose reply has one choice.
    pub(crate) fn check_single(&self) -> Result<(), ApiError> {
        let checks = [
            ("n", self.n != 1),
            ("echo", self.echo),
            ("prompt_logprobs", self.prompt_logprobs.is_some()),
            ("return_token_ids", self.return_token_ids),
        ];
        match checks.into_iter().find(|(_, unsupported)| *unsupported) {
            None => Ok(()),
            Some((name, _)) => {
                Err(ApiError::unsupported(name, "is not supported by this endpoint"))
            }
        }
    }

    /// Parses `max_tokens` and `max_completion_tokens`; `max_completion_tokens` takes precedence.
    pub(crate) fn take_max_tokens(
        &mut self,
        fields: &mut RequestFields,
        low: i64,
    ) -> Result<(), ApiError> {
        for name in ["max_tokens", "max_completion_tokens"] {
            if let Some(count) = fields.int(name, low..=i64::from(u32::MAX))? {
                (self.max_tokens, self.max_tokens_field) = (Some(count as u32), name);
            }
        }
        self.check_min_tokens()
    }

    /// Checks that `min_tokens` is not above `max_tokens`.
    pub(crate) fn check_min_tokens(&self) -> Result<(), ApiError> {
        let (min, max) = (self.sampling.min_tokens, self.max_tokens.unwrap_or(u32::MAX));
        if min <= max {
            return Ok(());
        }
        let message = format!("min_tokens is {min}, more than {} {max}", self.max_tokens_field);
        Err(ApiError::invalid("min_tokens", message))
    }
}

/// Parses `logprobs`, `top_logprobs` or `prompt_logprobs`: a number from 0 to the limit, or −1 for the whole
/// vocabulary.
pub(crate) fn count_of_logprobs(
    fields: &mut RequestFields,
    name: &str,
    bounds: &FieldBounds,
) -> Result<Option<u32>, ApiError> {
    let (cap, all) = match bounds.logprobs_max {
        Some(cap) => (i64::from(cap), None),
        None => (i64::from(bounds.vocab_size), Some(u32::MAX)),
    };
    // −1 (whole vocabulary) is accepted only if the server has no limit.
    let Some(count) = fields.int(name, -1..=cap)? else { return Ok(None) };
    match (count, all) {
        (-1, None) => {
            let message = format!("-1 means the whole vocabulary, the limit is {cap}");
            Err(ApiError::invalid(fields.path(name), message))
        }
        (-1, all) => Ok(all),
        (count, _) => Ok(Some(count as u32)),
    }
}
