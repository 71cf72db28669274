//! Parses the request fields shared by chat and text completions: checks types and ranges, and sets defaults.

use super::logprobs::{TokenFormat, TokenFormatter};
use super::{structured_outputs, unsupported_fields};
use crate::api_error::ApiError;
use crate::app::{ServerOptions, ServingContext};
use crate::request_fields::{RequestFields, string_list, wrong_type};
use crate::strict_json::JsonValue;
use grammar::OutputConstraint;
use protocol::{SamplingParams, Token};
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
const STRINGS_MAX: usize = 16;
const STRING_BYTES_MAX: usize = 256;
const BAD_WORDS_MAX: usize = 64;
const STOP_IDS_MAX: usize = 128;
const LOGIT_BIAS_MAX: usize = 1_024;

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

fn sampling(
    fields: &mut RequestFields,
    bounds: &FieldBounds,
    defaults: &SamplingDefaults,
) -> Result<SamplingParams, ApiError> {
    let top_k = fields.int("top_k", -1..=i64::from(u32::MAX))?;
    let repetition = fields.float("repetition_penalty", 0.0..=f32::MAX, true)?;
    let allowed = ids(fields, "allowed_token_ids", bounds.vocab_size as usize, bounds)?;
    if allowed.as_ref().is_some_and(Vec::is_empty) {
        let message = "must contain at least one id";
        return Err(ApiError::invalid("allowed_token_ids", message));
    }
    Ok(SamplingParams {
        temperature: fields.float("temperature", 0.0..=2.0, false)?.unwrap_or(defaults.temperature),
        top_k: top_k.map_or(defaults.top_k, |k| k.max(0) as u32),
        top_p: fields.float("top_p", 0.0..=1.0, true)?.unwrap_or(defaults.top_p),
        min_p: fields.float("min_p", 0.0..=1.0, false)?.unwrap_or(defaults.min_p),
        repetition_penalty: repetition.unwrap_or(defaults.repetition),
        frequency_penalty: fields.float("frequency_penalty", -2.0..=2.0, false)?.unwrap_or(0.0),
        presence_penalty: fields.float("presence_penalty", -2.0..=2.0, false)?.unwrap_or(0.0),
        min_tokens: fields.int("min_tokens", 0..=i64::from(u32::MAX))?.unwrap_or(0) as u32,
        logit_bias: logit_bias(fields, bounds)?,
        allowed_token_ids: allowed,
        ..SamplingParams::greedy()
    })
}

fn ids(
    fields: &mut RequestFields,
    name: &str,
    len_max: usize,
    bounds: &FieldBounds,
) -> Result<Option<Vec<Token>>, ApiError> {
    let list = fields.ints(name, 0..=i64::from(bounds.vocab_size) - 1, len_max)?;
    Ok(list.map(|ids| ids.into_iter().map(|id| id as Token).collect()))
}

fn stop_strings(fields: &mut RequestFields) -> Result<Vec<String>, ApiError> {
    match fields.take("stop") {
        None => Ok(Vec::new()),
        Some(JsonValue::Str(one)) => string_list(
            "stop",
            JsonValue::List(vec![JsonValue::Str(one)]),
            STRING_BYTES_MAX,
            STRINGS_MAX,
        ),
        Some(list @ (JsonValue::List(_) | JsonValue::Ints(_))) => {
            string_list("stop", list, STRING_BYTES_MAX, STRINGS_MAX)
        }
        Some(other) => Err(wrong_type("stop".to_owned(), "a string or a list of strings", &other)),
    }
}

/// Parses one entry of `logit_bias`: a token id and the bias of its logit.
fn logit_bias_entry(
    key: &str,
    value: &JsonValue,
    bounds: &FieldBounds,
) -> Result<(Token, f32), ApiError> {
    let vocab_size = bounds.vocab_size;
    let id = key.parse::<Token>().ok().filter(|id| *id < vocab_size).ok_or_else(|| {
        let message = format!("keys must be token ids below {vocab_size}");
        ApiError::invalid("logit_bias", message)
    })?;
    let bias = value.as_f64();
    let bias =
        bias.ok_or_else(|| wrong_type(format!("logit_bias.{id}"), "a number", value))? as f32;
    Ok((id, bias.clamp(-100.0, 100.0)))
}

fn logit_bias(
    fields: &mut RequestFields,
    bounds: &FieldBounds,
) -> Result<Vec<(Token, f32)>, ApiError> {
    let Some(value) = fields.take("logit_bias") else { return Ok(Vec::new()) };
    let JsonValue::Object(pairs) = value else {
        return Err(wrong_type("logit_bias".to_owned(), "an object", &value));
    };
    if pairs.len() > LOGIT_BIAS_MAX {
        let message = format!("at most {LOGIT_BIAS_MAX} entries, got {}", pairs.len());
        return Err(ApiError::invalid("logit_bias", message));
    }
    let entries = pairs.into_iter().map(|(key, value)| logit_bias_entry(&key, &value, bounds));
    let mut biases: Vec<(Token, f32)> = entries.collect::<Result<_, _>>()?;
    biases.sort_unstable_by_key(|(id, _)| *id);
    // Duplicates are detected after parsing, because the keys "7" and "07" are different strings for the
    // same token id.
    match biases.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        None => Ok(biases),
        Some(pair) => {
            Err(ApiError::invalid("logit_bias", format!("duplicate token id {}", pair[0].0)))
        }
    }
}

fn stream_options(fields: &mut RequestFields, stream: bool) -> Result<StreamOptions, ApiError> {
    let Some(value) = fields.take("stream_options") else { return Ok(StreamOptions::default()) };
    let mut options = RequestFields::of("stream_options".to_owned(), value)?;
    if !stream {
        let message = "stream_options needs stream: true";
        return Err(ApiError::invalid("stream_options", message));
    }
    Ok(StreamOptions {
        include_usage: options.bool("include_usage")?.unwrap_or(false),
        continuous_usage: options.bool("continuous_usage_stats")?.unwrap_or(false),
    })
}

/// Parses `truncate_prompt_tokens` and `truncation_side`. `default_side` applies if `truncation_side` is
/// absent; `longest` is the number of tokens kept for −1.
pub(super) fn truncation(
    fields: &mut RequestFields,
    bounds: &FieldBounds,
    default_side: fn(u32) -> PromptTruncation,
    longest: u32,
) -> Result<Option<PromptTruncation>, ApiError> {
    let limit = i64::from(bounds.max_model_len);
    let side = fields.string("truncation_side", 16)?;
    let truncation = match side.as_deref() {
        None => default_side,
        // `truncation_side` names the side that is cut; the other side is kept.
        Some("left") => PromptTruncation::KeepLast,
        Some("right") => PromptTruncation::KeepFirst,
        Some(_) => {
            return Err(ApiError::invalid("truncation_side", "must be \"left\" or \"right\""));
        }
    };
    let Some(count) = fields.int("truncate_prompt_tokens", -1..=limit)? else { return Ok(None) };
    let count = match count {
        0 => return Err(ApiError::invalid("truncate_prompt_tokens", "must be -1 or at least 1")),
        -1 => longest,
        count => count as u32,
    };
    Ok(Some(truncation(count)))
}

pub(super) fn cache_salt(fields: &mut RequestFields) -> Result<Option<String>, ApiError> {
    let Some((name, value)) = fields.take_with_alias("cache_salt", "extra_key")? else {
        return Ok(None);
    };
    let is_valid =
        |s: &str| (1..=128).contains(&s.chars().count()) && !s.contains(['@', '/', '\\', '\0']);
    match value {
        JsonValue::Str(salt) if is_valid(&salt) => Ok(Some(salt)),
        JsonValue::Str(_) => {
            let message = "must have 1 to 128 characters, none of them @ / \\ or NUL";
            Err(ApiError::invalid(name, message))
        }
        other => Err(wrong_type(name.to_owned(), "a string", &other)),
    }
}

/// Whether a request id sent by a client is well-formed.
pub(crate) fn is_request_id(id: &str) -> bool {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || b"._:-".contains(&b);
    (1..=128).contains(&id.len()) && id.bytes().all(allowed)
}

pub(super) fn request_id(fields: &mut RequestFields) -> Result<Option<String>, ApiError> {
    let check = |(name, value): (&str, JsonValue)| match value {
        JsonValue::Str(id) if is_request_id(&id) => Ok(id),
        JsonValue::Str(_) => {
            let message = "must have 1 to 128 characters out of A-Z a-z 0-9 . _ : -";
            Err(ApiError::invalid(name, message))
        }
        other => Err(wrong_type(name.to_owned(), "a string", &other)),
    };
    fields.take("session_id").map(|id| check(("session_id", id))).transpose()?;
    fields.take_with_alias("request_id", "rid")?.map(check).transpose()
}

pub(super) fn priority(fields: &mut RequestFields, bounds: &FieldBounds) -> Result<i32, ApiError> {
    let range = i64::from(i32::MIN)..=i64::from(i32::MAX);
    let priority = fields.int("priority", range)?.unwrap_or(0) as i32;
    if priority != 0 && !bounds.priorities {
        let message = format!(
            "priority {priority} needs --scheduling-policy priority; this server uses fcfs"
        );
        return Err(ApiError::invalid("priority", message));
    }
    Ok(priority)
}
