//! Collects the deltas of all choices for a non-streaming reply.

use super::choice::{ChoiceFinishReason, StopMatch};
use super::generation::{RequestGeneration, engine_error};
use crate::api_error::ApiError;
use bytes::{BufMut, BytesMut};
use protocol::{Token, TokenLogprobs};
use serde::Serialize;
use serde_json::{Value, json};
use std::future::poll_fn;
use std::io::Write as _;
use text::OutputPieces;

/// Complete output of one choice.
#[derive(Debug)]
pub(crate) struct CollectedChoice {
    /// Text as generated, before parsing.
    pub text: String,
    /// Text split into reasoning, content and tool calls, if the choice has a parser.
    pub pieces: OutputPieces,
    /// Generated tokens.
    pub tokens: Vec<Token>,
    /// Log-probabilities, one entry per token, if requested.
    pub logprobs: Vec<TokenLogprobs>,
    /// Log-probabilities of the prompt tokens from the second token on (the first has none); empty if not
    /// requested.
    pub prompt_logprobs: Vec<TokenLogprobs>,
    /// Why the choice ended.
    pub end: ChoiceFinishReason,
}

/// Waits until all choices have ended. Returns the choices, and the generation, which contains the token
/// counts and the memory reservation.
///
/// Errors: the failure of the request or of one of its choices, with an HTTP status.
pub(crate) async fn collect(
    mut generation: RequestGeneration,
) -> Result<(Vec<CollectedChoice>, RequestGeneration), ApiError> {
    let empty = |_| CollectedChoice {
        text: String::new(),
        pieces: OutputPieces::default(),
        tokens: Vec::new(),
        logprobs: Vec::new(),
        prompt_logprobs: Vec::new(),
        end: ChoiceFinishReason::Length,
    };
    let mut choices: Vec<CollectedChoice> = (0..generation.choices()).map(empty).collect();
    while !generation.has_ended() {
        poll_fn(|cx| generation.poll_events(cx)).await;
        generation.drain(|index, delta, _| {
            let choice = &mut choices[index as usize];
            choice.text.push_str(&delta.text);
            choice.pieces.append(&delta.pieces);
            choice.tokens.extend_from_slice(&delta.tokens);
            append(&mut choice.logprobs, &mut delta.logprobs);
            if let Some(end) = &delta.end {
                choice.end = end.clone();
            }
        });
    }
    if let Some(error) = generation.take_request_error() {
        return Err(error);
    }
    let failed = choices.iter().find_map(|choice| match choice.end {
        ChoiceFinishReason::Error(code) => Some(engine_error(code)),
        _ => None,
    });
    if let Some(error) = failed {
        return Err(error);
    }
    for (index, choice) in choices.iter_mut().enumerate() {
        choice.prompt_logprobs = generation.take_prompt_logprobs(index);
    }
    Ok((choices, generation))
}

/// Waits for the end of a request with one choice; returns the choice and the generation.
pub(crate) async fn collect_one(
    generation: RequestGeneration,
) -> Result<(CollectedChoice, RequestGeneration), ApiError> {
    let (choices, generation) = collect(generation).await?;
    let choice = choices.into_iter().next().ok_or_else(ApiError::internal)?;
    Ok((choice, generation))
}

/// Serialises a reply to JSON.
pub(crate) fn body_of(reply: &impl Serialize) -> Result<String, ApiError> {
    serde_json::to_string(reply).map_err(|_| ApiError::internal())
}

/// Appends entries to a list. The capacity grows by a quarter instead of doubling, because long lists take
/// much memory.
fn append(list: &mut Vec<TokenLogprobs>, more: &mut Vec<TokenLogprobs>) {
    if list.capacity() - list.len() < more.len() {
        list.reserve_exact(more.len().max(list.len() / 4));
    }
    list.append(more);
}

/// Appends the fields `finish_reason` and `stop_reason` of a complete choice.
pub(crate) fn put_end(end: &ChoiceFinishReason, out: &mut BytesMut) {
    let (name, reason) = (end.name(), stop_reason(end));
    // Writing to memory cannot fail, so the result is ignored.
    let _ = write!(out.writer(), ",\"finish_reason\":\"{name}\",\"stop_reason\":{reason}");
}

fn stop_reason(end: &ChoiceFinishReason) -> Value {
    match end {
        ChoiceFinishReason::Stop(StopMatch::Id(id))
        | ChoiceFinishReason::Calls(StopMatch::Id(id)) => json!(id),
        ChoiceFinishReason::Stop(StopMatch::Text(text))
        | ChoiceFinishReason::Calls(StopMatch::Text(text)) => {
            json!(text)
        }
        _ => Value::Null,
    }
}
