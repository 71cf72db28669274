//! Converts the vocabulary of a tokenizer to the form that the grammar engine (llguidance) uses.

use super::token_table::TokenKind;
use super::tokenizer::Tokenizer;
use grammar::GrammarVocabulary;
use protocol::Token;
use std::sync::Arc;

impl Tokenizer {
    /// Returns the bytes of all tokens, the special tokens and the EOS tokens.
    pub fn grammar_vocabulary(self: &Arc<Self>) -> GrammarVocabulary {
        let ids = || 0..self.vocab_size() as Token;
        let bytes = |id: Token| match self.token_table.kind(id) {
            TokenKind::Unassigned => Vec::new(),
            TokenKind::Plain | TokenKind::Byte | TokenKind::Special => {
                self.token_bytes(id).to_vec()
            }
        };
        let tokenizer = Arc::clone(self);
        GrammarVocabulary {
            tokens: ids().map(bytes).collect(),
            special: ids().filter(|&id| self.is_special(id)).collect(),
            end_ids: self.eos_ids().to_vec(),
            encode: Arc::new(move |text| tokenizer.encode(text, false).ok()),
        }
    }
}
