//! Converts the fields of a `/generate` request to the fields of a text completion request.

use crate::api_error::ApiError;
use crate::openai::chat::messages::reject_media;
use crate::request_fields::RequestFields;
use crate::strict_json::JsonValue;

/// Default of `max_new_tokens`, as in SGLang.
const MAX_NEW_TOKENS_DEFAULT: i64 = 128;
const SAMPLING: &str = "sampling_params";

/// Sampling parameters: SGLang's name and the name in a text completion.
const SAMPLING_NAMES: [(&str, &str); 21] = [
    ("max_new_tokens", "max_tokens"),
    ("min_new_tokens", "min_tokens"),
    ("sampling_seed", "seed"),
    ("no_stop_trim", "include_stop_str_in_output"),
    ("stop", "stop"),
    ("stop_token_ids", "stop_token_ids"),
    ("temperature", "temperature"),
    ("top_p", "top_p"),
    ("top_k", "top_k"),
    ("min_p", "min_p"),
    ("frequency_penalty", "frequency_penalty"),
    ("presence_penalty", "presence_penalty"),
    ("repetition_penalty", "repetition_penalty"),
    ("n", "n"),
    ("json_schema", "json_schema"),
    ("regex", "regex"),
    ("ignore_eos", "ignore_eos"),
    ("skip_special_tokens", "skip_special_tokens"),
    ("spaces_between_special_tokens", "spaces_between_special_tokens"),
    ("stream_interval", "stream_interval"),
    ("logit_bias", "logit_bias"),
];
/// Unsupported sampling parameters that would change the output.
const UNSUPPORTED_SAMPLING: [&str; 4] = ["ebnf", "structural_tag", "stop_regex", "custom_params"];
/// Fields with the same name in `/generate` and in text completions.
const SHARED_NAMES: [&str; 8] = [
    "stream",
    "rid",
    "session_id",
    "priority",
    "cache_salt",
    "extra_key",
    "data_parallel_rank",
    "model",
];
/// Unsupported fields that would change the reply. `false`, empty objects, and lists of nulls count as
/// absent.
const UNSUPPORTED: [&str; 26] = [
    "input_embeds",
    "image_data",
    "video_data",
    "audio_data",
    "session_params",
    "lora_path",
    "lora_id",
    "custom_logit_processor",
    "positional_embed_overrides",
    "token_ids_logprob",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "disagg_prefill_dp_rank",
    "max_thinking_tokens",
    "multi_item_delimiter_indices",
    "return_hidden_states",
    "return_sampling_mask",
    "return_routed_experts",
    "return_indexer_topk",
    "return_entropy",
    "return_prompt_token_ids",
    "return_flat_raw_top_logprobs",
    "require_reasoning",
    "return_bytes",
    "background",
];

/// Fields with media, and the kind of media for errors.
const MEDIA: [(&str, &str); 3] =
    [("image_data", "image"), ("video_data", "video"), ("audio_data", "audio")];

/// Log-probabilities requested by a `/generate` request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct GenerateLogprobOptions {
    /// Number of top-k log-probabilities per token.
    pub(super) top: u32,
    /// Index of the first prompt token whose log-probabilities are returned; `None` = only output tokens.
    pub(super) prompt_start: Option<usize>,
    /// Whether each entry contains the text of its token.
    pub(super) with_text: bool,
}

/// `/generate` request, converted to a text completion.
pub(super) struct GenerateRequest {
    /// Fields of the text completion.
    pub(super) completion: RequestFields,
    /// Whether the reply is a list: the request contains a list of prompts, or more than one choice per
    /// prompt.
    pub(super) is_batch: bool,
    pub(super) logprobs: Option<GenerateLogprobOptions>,
    /// Name of the field that contains the prompts.
    pub(super) prompt_field: &'static str,
    /// Sampling parameters that were ignored.
    pub(super) ignored: Vec<String>,
}

impl GenerateRequest {
    /// Parses the fields of a `/generate` request.
    ///
    /// Errors: HTTP status 400; the error names the invalid or unsupported field.
    pub(super) fn take(fields: &mut RequestFields) -> Result<Self, ApiError> {
        reject_unsupported(fields, &UNSUPPORTED)?;
        let (prompt_field, prompt) = prompt(fields)?;
        let mut is_batch = is_list_of_prompts(&prompt);
        let mut pairs = vec![("prompt".to_owned(), prompt)];
        for name in SHARED_NAMES {
            pairs.extend(fields.take(name).map(|value| (name.to_owned(), value)));
        }
        if let Some(rank) = fields.take("routed_dp_rank") {
            pairs.push(("data_parallel_rank".to_owned(), rank));
        }
        let mut sampling = sampling(fields)?;
        reject_unsupported(&mut sampling, &UNSUPPORTED_SAMPLING)?;
        let mut has_limit = false;
        for (name, completion_name) in SAMPLING_NAMES {
            let Some(value) = sampling.take(name) else { continue };
            has_limit |= name == "max_new_tokens";
            is_batch |= name == "n" && value != JsonValue::Int(1);
            pairs.push((completion_name.to_owned(), value));
        }
        if !has_limit {
            let limit = JsonValue::Int(MAX_NEW_TOKENS_DEFAULT);
            pairs.push(("max_tokens".to_owned(), limit));
        }
        let logprobs = logprobs(fields)?;
        if let Some(logprobs) = logprobs {
            let top = JsonValue::Int(i64::from(logprobs.top));
            if logprobs.prompt_start.is_some() {
                pairs.push(("prompt_logprobs".to_owned(), top.clone()));
                pairs.push(("return_token_ids".to_owned(), JsonValue::Bool(true)));
            }
            pairs.push(("logprobs".to_owned(), top));
        }
        let ignored = sampling.ignored_names().iter().map(|name| sampling.path(name)).collect();
        let completion = RequestFields::of_body(JsonValue::Object(pairs))?;
        Ok(Self { completion, is_batch, logprobs, prompt_field, ignored })
    }
}

/// Removes the field that contains the prompts, `text` or `input_ids`; returns its name and its value.
fn prompt(fields: &mut RequestFields) -> Result<(&'static str, JsonValue), ApiError> {
    match (fields.take("text"), fields.take("input_ids")) {
        (Some(text), None) => Ok(("text", text)),
        (None, Some(ids)) => Ok(("input_ids", ids)),
        (None, None) => Err(ApiError::invalid("text", "is missing; or give input_ids")),
        (Some(_), Some(_)) => {
            Err(ApiError::invalid("input_ids", "give either text or input_ids, not both"))
        }
    }
}

fn is_list_of_prompts(prompt: &JsonValue) -> bool {
    match prompt {
        JsonValue::List(list) => list.iter().any(|one| !one.is_number()),
        _ => false,
    }
}

/// Parses `sampling_params`: an object, or a list of equal objects, one per prompt.
fn sampling(fields: &mut RequestFields) -> Result<RequestFields, ApiError> {
    let value = match fields.take(SAMPLING) {
        None => JsonValue::Object(Vec::new()),
        Some(JsonValue::List(mut list)) if !list.is_empty() => {
            let first = list.swap_remove(0);
            if list.iter().any(|other| *other != first) {
                let message = "different parameters in one request are not supported";
                return Err(ApiError::unsupported(SAMPLING, message));
            }
            first
        }
        Some(value) => value,
    };
    RequestFields::of(SAMPLING.to_owned(), value)
}

/// Rejects unsupported fields, unless their value counts as absent.
fn reject_unsupported(fields: &mut RequestFields, names: &[&str]) -> Result<(), ApiError> {
    for name in names {
        let is_absent = match fields.take(name) {
            None | Some(JsonValue::Bool(false)) => true,
            Some(JsonValue::List(list)) => list.iter().all(|item| *item == JsonValue::Null),
            Some(JsonValue::Object(pairs)) => pairs.is_empty(),
            Some(_) => false,
        };
        if !is_absent {
            if let Some((_, media)) = MEDIA.iter().find(|(field, _)| field == name) {
                reject_media(media, &fields.path(name))?;
            }
            let message = format!("{name} is not supported by this server");
            return Err(ApiError::unsupported(fields.path(name), message));
        }
    }
    Ok(())
}

/// Parses the log-probability fields. In a batch, each field may be a list of equal values.
fn logprobs(fields: &mut RequestFields) -> Result<Option<GenerateLogprobOptions>, ApiError> {
    for name in ["return_logprob", "logprob_start_len", "top_logprobs_num"] {
        replace_uniform_list(fields, name)?;
    }
    let top = fields.int("top_logprobs_num", 0..=i64::from(u32::MAX))?.unwrap_or(0) as u32;
    let start = fields.int("logprob_start_len", -1..=i64::from(u32::MAX))?.unwrap_or(-1);
    let with_text = fields.bool("return_text_in_logprobs")?.unwrap_or(false);
    let requested = fields.bool("return_logprob")?.unwrap_or(false);
    let prompt_start = usize::try_from(start).ok();
    Ok(requested.then_some(GenerateLogprobOptions { top, prompt_start, with_text }))
}

/// Replaces a list of equal values in the field `name` by one of these values.
fn replace_uniform_list(fields: &mut RequestFields, name: &str) -> Result<(), ApiError> {
    let Some(value) = fields.take(name) else { return Ok(()) };
    let list = match value {
        JsonValue::List(list) => list,
        JsonValue::Ints(list) => list.into_iter().map(JsonValue::Int).collect(),
        value => {
            fields.put_back(name, value);
            return Ok(());
        }
    };
    if list.windows(2).any(|pair| pair[0] != pair[1]) {
        let message = "different values in one request are not supported";
        return Err(ApiError::unsupported(name, message));
    }
    if let Some(value) = list.into_iter().next().filter(|value| *value != JsonValue::Null) {
        fields.put_back(name, value);
    }
    Ok(())
}

/// Replaces the text completion field name in an error by the field name in the `/generate` request.
pub(super) fn rename_field(error: ApiError, prompt_field: &str) -> ApiError {
    let Some(param) = &error.param else { return error };
    let sampling = SAMPLING_NAMES.iter().find(|(_, completion_name)| {
        param
            .strip_prefix(completion_name)
            .is_some_and(|rest| !rest.starts_with(char::is_alphanumeric) && !rest.starts_with('_'))
    });
    let renamed = match (param.as_str(), sampling) {
        ("logprobs", _) => "top_logprobs_num".to_owned(),
        ("prompt_logprobs", _) => "logprob_start_len".to_owned(),
        (_, Some((name, completion_name))) => {
            format!("{SAMPLING}.{name}{}", &param[completion_name.len()..])
        }
        (param, None) => match param.strip_prefix("prompt") {
            Some(rest) => format!("{prompt_field}{rest}"),
            None => param.to_owned(),
        },
    };
    ApiError { param: Some(renamed), ..error }
}
