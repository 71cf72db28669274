//! Pooling method of a request, in the form that the device applies.

use crate::Token;
use serde::{Deserialize, Serialize};

/// What a pooling request computes from the hidden states of its prompt, after the final norm. It samples no
/// token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum PoolingMethod {
    /// Hidden state of the last prompt token.
    LastToken,
    /// Mean of the hidden states of all prompt tokens.
    Mean,
    /// Outputs of the classification head (`score.weight`) for the last prompt token, before the activation.
    ClassLogits,
    /// Log-probabilities of these token ids as the token after the prompt, in this order.
    TokenLogprobs(Vec<Token>),
}

impl PoolingMethod {
    /// Returns whether the method reads the hidden state of every prompt token, so that none may be skipped
    /// by a prefix hit.
    #[must_use]
    pub fn reads_every_token(&self) -> bool {
        *self == Self::Mean
    }
}
