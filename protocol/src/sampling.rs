//! The sampling rules of one request, in the form the device applies them.

use crate::Token;
use serde::{Deserialize, Serialize};

/// How the next token of a request is chosen. Everything is resolved: no defaults are applied later.
///
/// Order of application: allowed ids, bad words, `min_tokens` mask, logit bias, repetition,
/// frequency and presence penalties, temperature, min-p, top-k, top-p, draw.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SamplingParams {
    /// Softmax temperature; below `1e-5` the argmax is taken, lowest id on ties.
    pub temperature: f32,
    /// Keep the `top_k` most likely ids; 0 = all.
    pub top_k: u32,
    /// Keep the smallest set of ids whose probability reaches `top_p`; 1 = all.
    pub top_p: f32,
    /// Drop ids less likely than `min_p` times the most likely one; 0 = none.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of ids in prompt or output; 1 = off.
    pub repetition_penalty: f32,
    /// Subtracted once per earlier occurrence in the output; 0 = off.
    pub frequency_penalty: f32,
    /// Subtracted once if the id occurred in the output; 0 = off.
    pub presence_penalty: f32,
    /// Output length in tokens below which the ids in `stop_ids` are masked.
    pub min_tokens: u32,
    /// Ids that end the request: masked below `min_tokens`, otherwise not read by the device.
    pub stop_token_ids: Vec<Token>,
    /// Added to the logits of single ids.
    #[serde(with = "crate::packed_list")]
    pub logit_bias: Vec<(Token, f32)>,
    /// If present, every other id is masked.
    pub allowed_token_ids: Option<Vec<Token>>,
    /// Token sequences that must not be completed.
    pub bad_words: Vec<Vec<Token>>,
    /// Log-probabilities to report per emitted token: `None` = none, `Some(n)` = the chosen one and
    /// the `n` most likely; `u32::MAX` = the whole vocabulary.
    pub logprobs: Option<u32>,
    /// The same for prompt tokens.
    pub prompt_logprobs: Option<u32>,
}

impl SamplingParams {
    /// Argmax decoding with every rule off.
    pub fn greedy() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            min_tokens: 0,
            stop_token_ids: Vec::new(),
            logit_bias: Vec::new(),
            allowed_token_ids: None,
            bad_words: Vec::new(),
            logprobs: None,
            prompt_logprobs: None,
        }
    }

    /// Whether a rule reads ids seen earlier, so that the executor needs the history of the request.
    pub fn needs_token_history(&self) -> bool {
        self.repetition_penalty != 1.0
            || self.frequency_penalty != 0.0
            || self.presence_penalty != 0.0
            || !self.bad_words.is_empty()
    }
}
