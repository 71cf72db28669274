//! Gathers the deltas of a unary reply.

use super::choice::{End, StoppedBy};
use super::generation::{Generation, failure};
use crate::server::error::ApiError;
use crate::text::PieceList;
use protocol::{Token, TokenLogprobs};
use serde::Serialize;
use serde_json::{Value, json};
use std::future::poll_fn;

/// All of one choice.
#[derive(Debug)]
pub struct Whole {
    /// Its text, as the model wrote it.
    pub text: String,
    /// The same, told apart, if somebody reads it.
    pub pieces: PieceList,
    /// Its tokens.
    pub tokens: Vec<Token>,
    /// One entry per token, if asked for.
    pub logprobs: Vec<TokenLogprobs>,
    /// How it ended.
    pub end: End,
}

/// Waits for the end of every choice. Gives the generation back for usage and prompt logprobs.
///
/// Errors: a failure of the request or of one of its choices, as a status.
pub async fn collect(mut generation: Generation) -> Result<(Vec<Whole>, Generation), ApiError> {
    let empty = |_| Whole {
        text: String::new(),
        pieces: PieceList::default(),
        tokens: Vec::new(),
        logprobs: Vec::new(),
        end: End::Length,
    };
    let mut wholes: Vec<Whole> = (0..generation.choices()).map(empty).collect();
    while !generation.has_ended() {
        poll_fn(|cx| generation.poll_events(cx)).await;
        generation.drain(|index, delta, _| {
            let whole = &mut wholes[index as usize];
            whole.text.push_str(&delta.text);
            whole.pieces.append(&delta.pieces);
            whole.tokens.extend_from_slice(&delta.tokens);
            whole.logprobs.extend_from_slice(&delta.logprobs);
            if let Some(end) = &delta.end {
                whole.end = end.clone();
            }
        });
    }
    if let Some(error) = generation.take_fatal() {
        return Err(error);
    }
    let failed = wholes.iter().find_map(|whole| match whole.end {
        End::Error(code) => Some(failure(code)),
        _ => None,
    });
    match failed {
        Some(error) => Err(error),
        None => Ok((wholes, generation)),
    }
}

/// The same where there is one choice.
pub async fn collect_single(generation: Generation) -> Result<(Whole, Generation), ApiError> {
    let (wholes, generation) = collect(generation).await?;
    let whole = wholes.into_iter().next().ok_or_else(ApiError::internal)?;
    Ok((whole, generation))
}

/// A reply object as the body of a response.
pub fn body_of(reply: &impl Serialize) -> Result<String, ApiError> {
    serde_json::to_string(reply).map_err(|_| ApiError::internal())
}

/// The value of `stop_reason`.
pub fn stop_reason(end: &End) -> Value {
    match end {
        End::Stop(StoppedBy::Id(id)) | End::Calls(StoppedBy::Id(id)) => json!(id),
        End::Stop(StoppedBy::Text(text)) | End::Calls(StoppedBy::Text(text)) => json!(text),
        _ => Value::Null,
    }
}
