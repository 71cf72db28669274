//! Parses the fields shared by pooling requests, and submits their prompts to the engine.

use super::endpoint::HeaderParams;
use super::generation::RequestGeneration;
use super::params::{
    CompletionParams, FieldBounds, PromptTruncation, SamplingDefaults, cache_salt, priority,
    request_id, truncation,
};
use super::submit::{EndpointParams, start_generation};
use crate::api_error::ApiError;
use crate::app::{AppState, ServingContext};
use crate::request_fields::RequestFields;
use crate::strict_json::JsonValue;
use engine::AdmissionPermit;
use protocol::Token;

/// Removes the fields without effect, and rejects the fields of inputs other than text.
fn take_unused(fields: &mut RequestFields) -> Result<(), ApiError> {
    for name in ["user", "metadata"] {
        if fields.take(name).is_some() {
            fields.accept_without_effect(name.to_owned());
        }
    }
    for name in ["mm_processor_kwargs", "late_interaction_params"] {
        if fields.take(name).is_some() {
            return Err(ApiError::unsupported(name, "only text is supported"));
        }
    }
    Ok(())
}

/// Parses the fields shared by pooling requests.
///
/// Errors: HTTP status 400; the error names the first invalid field.
pub(crate) fn take(
    fields: &mut RequestFields,
    bounds: &FieldBounds,
) -> Result<CompletionParams, ApiError> {
    let mut no_fields = RequestFields::of_body(JsonValue::Object(Vec::new()))?;
    let neutral = CompletionParams::take(&mut no_fields, bounds, &SamplingDefaults::default())?;
    take_unused(fields)?;
    // As in vLLM, truncation keeps the first tokens by default, and the value −1 truncates the prompt to
    // the context length.
    let truncate = truncation(fields, bounds, PromptTruncation::KeepFirst, bounds.max_model_len)?;
    Ok(CompletionParams {
        model: fields.string("model", 512)?,
        max_tokens: Some(0),
        truncate,
        cache_salt: cache_salt(fields)?,
        request_id: request_id(fields)?,
        priority: priority(fields, bounds)?,
        replica: fields
            .int("data_parallel_rank", 0..=i64::from(bounds.replicas) - 1)?
            .map(|rank| rank as u16),
        ..neutral
    })
}

/// Parses `use_activation`, or its older name `normalize`.
pub(crate) fn take_activation(fields: &mut RequestFields) -> Result<Option<bool>, ApiError> {
    let (new, old) = (fields.bool("use_activation")?, fields.bool("normalize")?);
    if new.is_some() && old.is_some_and(|old| Some(old) != new) {
        return Err(ApiError::invalid("normalize", "contradicts use_activation"));
    }
    Ok(new.or(old))
}

/// Submits one pooling request to the engine for each prompt. `field` is the name of the field that contains
/// the prompts.
///
/// Errors: HTTP status 400 for a prompt that is empty or too long, 429 or 503 for overload.
pub(crate) fn submit_pooling(
    app: &AppState,
    serving: &ServingContext,
    params: &mut CompletionParams,
    prompts: &[Vec<Token>],
    field: &'static str,
    permit: AdmissionPermit,
) -> Result<RequestGeneration, ApiError> {
    params.sampling.pooling = Some(serving.pooler()?.method.clone());
    let extra = EndpointParams {
        logprobs: None,
        prompt_logprobs: None,
        max_tokens_default: None,
        prompt_field: field,
        parser: None,
        thinking: None,
    };
    start_generation(app, serving, params, prompts, extra, permit)
}

impl HeaderParams {
    /// Returns the request id of a pooling request, and sets the replica requested by its headers.
    pub(crate) fn pooling_request_id(
        &self,
        params: &mut CompletionParams,
        serving: &ServingContext,
        app: &AppState,
    ) -> Result<String, ApiError> {
        params.replica = self.replica(params.replica, serving.field_bounds.replicas)?;
        Ok(self.request_id(params, &app.id_generator))
    }
}
