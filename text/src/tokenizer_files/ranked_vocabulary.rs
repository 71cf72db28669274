//! tiktoken vocabularies: the bytes of the tokens in rank order. The rank of a token is also the priority of
//! every merge that produces this token.

use super::TOKEN_BYTES_MAX;
use crate::byte_alphabet::byte_level_spelling;
use base64::Engine as _;
use protocol::Token;
use serde_json::{Map, Value, json};
use std::collections::HashMap;

/// Tokens (bytes) by rank.
#[derive(Default)]
pub(super) struct RankedVocabulary {
    tokens: Vec<Vec<u8>>,
}

/// Merge of two tokens into one token; `at` is the byte offset between the two parts.
struct TokenMerge {
    left: usize,
    right: usize,
    at: usize,
}

impl RankedVocabulary {
    /// Appends a token given as base64. `rank` must be the next rank.
    pub(super) fn push(&mut self, rank: usize, base64: &[u8]) -> Result<(), String> {
        let bytes = base64::engine::general_purpose::STANDARD.decode(base64);
        let bytes = bytes.map_err(|error| format!("token of rank {rank}: {error}"))?;
        if rank != self.tokens.len() {
            return Err(format!(
                "rank {rank} follows {} tokens; ranks must be consecutive",
                self.len()
            ));
        }
        if bytes.is_empty() || bytes.len() > TOKEN_BYTES_MAX {
            let length = bytes.len();
            return Err(format!("token of rank {rank}: {length} bytes; 1 to {TOKEN_BYTES_MAX}"));
        }
        self.tokens.push(bytes);
        Ok(())
    }

    pub(super) fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Returns the ids by token string; rank 0 has the id `first_id`.
    ///
    /// Errors: two tokens are equal, or some byte is not a token.
    pub(super) fn vocab(&self, first_id: Token) -> Result<Map<String, Value>, String> {
        let mut vocab = Map::with_capacity(self.len());
        for (id, token) in (first_id..).zip(&self.tokens) {
            if vocab.insert(byte_level_spelling(token), json!(id)).is_some() {
                return Err(format!("the token of rank {} occurs twice", id - first_id));
            }
        }
        match (0..=u8::MAX).find(|byte| !vocab.contains_key(&byte_level_spelling(&[*byte]))) {
            Some(byte) => Err(format!("byte 0x{byte:02X} is not a token")),
            None => Ok(vocab),
        }
    }

    /// Returns all merges, ordered by the rank of the merged token.
    pub(super) fn merges(&self) -> Vec<Value> {
        let ranks: HashMap<&[u8], usize> =
            self.tokens.iter().enumerate().map(|(rank, token)| (token.as_slice(), rank)).collect();
        let mut merges = Vec::new();
        for token in &self.tokens {
            let split = |at: usize| {
                let (left, right) = (*ranks.get(&token[..at])?, *ranks.get(&token[at..])?);
                Some(TokenMerge { left, right, at })
            };
            let mut splits: Vec<TokenMerge> = (1..token.len()).filter_map(split).collect();
            splits.sort_unstable_by_key(|split| (split.left, split.right));
            merges.extend(splits.iter().map(|split| {
                let (left, right) = token.split_at(split.at);
                json!([byte_level_spelling(left), byte_level_spelling(right)])
            }));
        }
        merges
    }
}
