//! Vocabulary of the grammar engine: a trie of token bytes, and a tokenization function.

use super::limits::TOKEN_BYTES_MAX;
use llguidance::toktrie::{TokRxInfo, TokTrie, TokenId, TokenizerEnv};
use protocol::Token;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Tokenizes a text; returns `None` if the text cannot be tokenized.
pub type EncodeFn = Arc<dyn Fn(&str) -> Option<Vec<Token>> + Send + Sync>;

/// Vocabulary for compiling grammars: token bytes, special token ids and the tokenization function.
pub struct GrammarVocabulary {
    /// Bytes that each token adds to the output, by token id; empty = the token is never allowed.
    pub tokens: Vec<Vec<u8>>,
    /// Special token ids, which are allowed only where a grammar names them.
    pub special: Vec<Token>,
    /// End-of-text token ids.
    pub end_ids: Vec<Token>,
    /// Returns the canonical tokenization of a text. Where a grammar forces a text, only these token ids are
    /// allowed.
    pub encode: EncodeFn,
}

/// Trie of the bytes of all tokens.
pub(super) struct TokenTrie {
    trie: TokTrie,
    encode: EncodeFn,
}

impl TokenTrie {
    /// Creates the trie; `None` if there is no end-of-text token, because then no constrained output could
    /// end.
    pub(super) fn new(vocabulary: GrammarVocabulary) -> Option<Self> {
        let GrammarVocabulary { mut tokens, special, mut end_ids, encode } = vocabulary;
        end_ids.retain(|&id| (id as usize) < tokens.len());
        let first = *end_ids.first()?;
        for bytes in tokens.iter_mut().filter(|bytes| bytes.len() > TOKEN_BYTES_MAX) {
            bytes.clear();
        }
        let special_ids: BTreeSet<Token> = special.iter().chain(&end_ids).copied().collect();
        for id in special_ids {
            if let Some(bytes) = tokens.get_mut(id as usize).filter(|bytes| !bytes.is_empty()) {
                bytes.insert(0, TokTrie::SPECIAL_TOKEN_MARKER);
            }
        }
        let info = TokRxInfo::new(tokens.len() as u32, first);
        let trie = TokTrie::from(&info, &tokens).with_eos_tokens(&end_ids);
        Some(Self { trie, encode })
    }
}

impl TokenizerEnv for TokenTrie {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    /// Returns the canonical tokenization of `bytes` if its tokens have exactly these bytes. They may have
    /// other bytes, because some tokenizers add a space, or parse special tokens in the text; then returns
    /// a greedy tokenization.
    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        let text = std::str::from_utf8(bytes).ok();
        let canonical = text.and_then(|text| (self.encode)(text));
        let is_exact = |ids: &Vec<TokenId>| {
            let token = |&id: &TokenId| self.trie.token(id);
            ids.iter().all(|&id| (id as usize) < self.trie.vocab_size())
                && ids.iter().flat_map(token).eq(bytes)
        };
        canonical.filter(is_exact).unwrap_or_else(|| self.trie.greedy_tokenize(bytes))
    }
}
