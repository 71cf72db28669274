//! Token ids as the grammar engine sees them: bytes in a trie, and how text becomes ids.

use super::limits::TOKEN_BYTES_MAX;
use llguidance::toktrie::{TokRxInfo, TokTrie, TokenId, TokenizerEnv};
use protocol::Token;
use std::collections::BTreeSet;
use std::sync::Arc;

/// How a text becomes ids; `None` = it cannot.
pub type EncodeFn = Arc<dyn Fn(&str) -> Option<Vec<Token>> + Send + Sync>;

/// What there is to know about a tokenizer.
pub struct GrammarVocabulary {
    /// The bytes that each id adds to the output; empty = the id is never allowed.
    pub tokens: Vec<Vec<u8>>,
    /// Ids without text of their own, which only a grammar that names them allows.
    pub special: Vec<Token>,
    /// Ids that end a text.
    pub end_ids: Vec<Token>,
    /// The usual ids of a text: where a grammar leaves no choice of text, they are the only ones allowed.
    pub encode: EncodeFn,
}

/// The trie over all tokens.
pub(super) struct TokenTrie {
    trie: TokTrie,
    encode: EncodeFn,
}

impl TokenTrie {
    /// `None` if no id ends a text: no constrained output could ever end.
    pub(super) fn new(vocabulary: GrammarVocabulary) -> Option<Self> {
        let GrammarVocabulary { mut tokens, special, end_ids: mut ends, encode } = vocabulary;
        ends.retain(|&id| (id as usize) < tokens.len());
        let first = *ends.first()?;
        for bytes in tokens.iter_mut().filter(|bytes| bytes.len() > TOKEN_BYTES_MAX) {
            bytes.clear();
        }
        let marked: BTreeSet<Token> = special.iter().chain(&ends).copied().collect();
        for id in marked {
            if let Some(bytes) = tokens.get_mut(id as usize).filter(|bytes| !bytes.is_empty()) {
                bytes.insert(0, TokTrie::SPECIAL_TOKEN_MARKER);
            }
        }
        let info = TokRxInfo::new(tokens.len() as u32, first);
        let trie = TokTrie::from(&info, &tokens).with_eos_tokens(&ends);
        Some(Self { trie, encode })
    }
}

impl TokenizerEnv for TokenTrie {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    /// The usual ids, where they mean exactly these bytes: a tokenizer may add a space, or see a special
    /// token in plain text.
    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        let text = std::str::from_utf8(bytes).ok();
        let usual = text.and_then(|text| (self.encode)(text));
        let spelled = |ids: &Vec<TokenId>| {
            let token = |&id: &TokenId| self.trie.token(id);
            ids.iter().all(|&id| (id as usize) < self.trie.vocab_size())
                && ids.iter().flat_map(token).eq(bytes)
        };
        usual.filter(spelled).unwrap_or_else(|| self.trie.greedy_tokenize(bytes))
    }
}
