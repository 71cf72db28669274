//! Gathers the deltas of a unary reply.

use super::choice::{ChoiceFinish, StopMatch};
use super::generation::{RequestGeneration, engine_error};
use crate::api_error::ApiError;
use bytes::{BufMut, BytesMut};
use protocol::{Token, TokenLogprobs};
use serde::Serialize;
use serde_json::{Value, json};
use std::future::poll_fn;
use std::io::Write as _;
use text::OutputPieces;

/// All of one choice.
#[derive(Debug)]
pub(crate) struct CollectedChoice {
    /// Its text, as the model wrote it.
    pub text: String,
    /// The same, told apart, if somebody reads it.
    pub pieces: OutputPieces,
    /// Its tokens.
    pub tokens: Vec<Token>,
    /// One entry per token, if asked for.
    pub logprobs: Vec<TokenLogprobs>,
    /// Those of its prompt, if asked for. The first token has none.
    pub prompt_logprobs: Vec<TokenLogprobs>,
    /// How it ended.
    pub end: ChoiceFinish,
}

/// Waits for the end of every choice. Gives the generation back for usage, and for what it holds of the counters.
///
/// Errors: a failure of the request or of one of its choices, as a status.
pub(crate) async fn collect(
    mut generation: RequestGeneration,
) -> Result<(Vec<CollectedChoice>, RequestGeneration), ApiError> {
    let empty = |_| CollectedChoice {
        text: String::new(),
        pieces: OutputPieces::default(),
        tokens: Vec::new(),
        logprobs: Vec::new(),
        prompt_logprobs: Vec::new(),
        end: ChoiceFinish::Length,
    };
    let mut wholes: Vec<CollectedChoice> = (0..generation.choices()).map(empty).collect();
    while !generation.has_ended() {
        poll_fn(|cx| generation.poll_events(cx)).await;
        generation.drain(|index, delta, _| {
            let whole = &mut wholes[index as usize];
            whole.text.push_str(&delta.text);
            whole.pieces.append(&delta.pieces);
            whole.tokens.extend_from_slice(&delta.tokens);
            append(&mut whole.logprobs, &mut delta.logprobs);
            if let Some(end) = &delta.end {
                whole.end = end.clone();
            }
        });
    }
    if let Some(error) = generation.take_request_error() {
        return Err(error);
    }
    let failed = wholes.iter().find_map(|whole| match whole.end {
        ChoiceFinish::Error(code) => Some(engine_error(code)),
        _ => None,
    });
    if let Some(error) = failed {
        return Err(error);
    }
    for (index, whole) in wholes.iter_mut().enumerate() {
        whole.prompt_logprobs = generation.take_prompt_logprobs(index);
    }
    Ok((wholes, generation))
}

/// The same where there is one choice.
pub(crate) async fn collect_one(
    generation: RequestGeneration,
) -> Result<(CollectedChoice, RequestGeneration), ApiError> {
    let (wholes, generation) = collect(generation).await?;
    let whole = wholes.into_iter().next().ok_or_else(ApiError::internal)?;
    Ok((whole, generation))
}

/// A reply object as the body of a response.
pub(crate) fn body_of(reply: &impl Serialize) -> Result<String, ApiError> {
    serde_json::to_string(reply).map_err(|_| ApiError::internal())
}

/// Moves entries to the end of a list whose room grows by a quarter at a time, for long ones are many bytes.
fn append(list: &mut Vec<TokenLogprobs>, more: &mut Vec<TokenLogprobs>) {
    if list.capacity() - list.len() < more.len() {
        list.reserve_exact(more.len().max(list.len() / 4));
    }
    list.append(more);
}

/// Appends `finish_reason` and `stop_reason` of a whole choice.
pub(crate) fn put_end(end: &ChoiceFinish, out: &mut BytesMut) {
    let (name, reason) = (end.name(), stop_reason(end));
    // Writing to memory cannot fail.
    let _ = write!(out.writer(), ",\"finish_reason\":\"{name}\",\"stop_reason\":{reason}");
}

fn stop_reason(end: &ChoiceFinish) -> Value {
    match end {
        ChoiceFinish::Stop(StopMatch::Id(id)) | ChoiceFinish::Calls(StopMatch::Id(id)) => json!(id),
        ChoiceFinish::Stop(StopMatch::Text(text)) | ChoiceFinish::Calls(StopMatch::Text(text)) => {
            json!(text)
        }
        _ => Value::Null,
    }
}
