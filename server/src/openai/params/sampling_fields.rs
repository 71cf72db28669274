//! Sampling parameters of completion requests.

use super::{FieldBounds, STRING_BYTES_MAX, SamplingDefaults};
use crate::api_error::ApiError;
use crate::request_fields::{RequestFields, string_list, wrong_type};
use crate::strict_json::JsonValue;
use protocol::{SamplingParams, Token};

const LOGIT_BIAS_MAX: usize = 1_024;

const STRINGS_MAX: usize = 16;

pub(super) fn sampling(
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

pub(super) fn ids(
    fields: &mut RequestFields,
    name: &str,
    len_max: usize,
    bounds: &FieldBounds,
) -> Result<Option<Vec<Token>>, ApiError> {
    let list = fields.ints(name, 0..=i64::from(bounds.vocab_size) - 1, len_max)?;
    Ok(list.map(|ids| ids.into_iter().map(|id| id as Token).collect()))
}

pub(super) fn stop_strings(fields: &mut RequestFields) -> Result<Vec<String>, ApiError> {
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
