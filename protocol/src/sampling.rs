//! Sampling parameters of one request, in the form that the device applies.

use crate::{PoolingMethod, Token};
use serde::{Deserialize, Serialize};

/// Sampling parameters of a request. All values are resolved: no defaults are applied later.
///
/// Order of application: allowed ids, bad words, `min_tokens` mask, logit bias, repetition, frequency and
/// presence penalties, temperature, min-p, top-k, top-p, random draw.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SamplingParams {
    /// Softmax temperature; below `1e-5` decoding is greedy (argmax, lowest id on ties).
    pub temperature: f32,
    /// Keeps the `top_k` most likely tokens; 0 = all.
    pub top_k: u32,
    /// Keeps the smallest set of tokens with a total probability of at least `top_p`; 1 = all.
    pub top_p: f32,
    /// Drops tokens less likely than `min_p` times the most likely token; 0 = none.
    pub min_p: f32,
    /// Repetition penalty for tokens that occur in the prompt or output: positive logits are divided by it,
    /// negative logits are multiplied by it; 1 = off.
    pub repetition_penalty: f32,
    /// Penalty that is subtracted from the logit of a token once per earlier occurrence in the output; 0 =
    /// off.
    pub frequency_penalty: f32,
    /// Penalty that is subtracted once from the logit of a token that occurred in the output; 0 = off.
    pub presence_penalty: f32,
    /// Output length in tokens below which `stop_token_ids` are masked.
    pub min_tokens: u32,
    /// Token ids that end the request: masked below `min_tokens`, otherwise not read by the device.
    pub stop_token_ids: Vec<Token>,
    /// Bias added to the logits of single tokens.
    #[serde(with = "crate::packed_list")]
    pub logit_bias: Vec<(Token, f32)>,
    /// The only token ids that may be sampled: all others are masked. `None` = no restriction.
    pub allowed_token_ids: Option<Vec<Token>>,
    /// Token sequences that must not occur in the output: a token that would complete one is masked.
    pub bad_words: Vec<Vec<Token>>,
    /// Logprobs to report per emitted token: `None` = none, `Some(n)` = the sampled token and the top `n`;
    /// `u32::MAX` = the whole vocabulary.
    pub logprobs: Option<u32>,
    /// Logprobs to report per prompt token, in the form of `logprobs`.
    pub prompt_logprobs: Option<u32>,
    /// Pooling method of a request without output tokens; `None` = the request generates tokens.
    pub pooling: Option<PoolingMethod>,
}

impl SamplingParams {
    /// Returns the parameters of greedy decoding with all other sampling options off.
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
            pooling: None,
        }
    }

    /// Returns whether an option (penalties or bad words) reads earlier tokens, so that the executor needs
    /// the token history of the request.
    pub fn needs_token_history(&self) -> bool {
        self.repetition_penalty != 1.0
            || self.frequency_penalty != 0.0
            || self.presence_penalty != 0.0
            || !self.bad_words.is_empty()
    }
}
