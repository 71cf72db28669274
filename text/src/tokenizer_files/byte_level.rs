//! Byte-level BPE tokenizers in the form of `tokenizer.json`.

use serde_json::{Map, Value, json};

/// Parts of a byte-level BPE tokenizer.
pub(super) struct ByteLevelParts {
    /// Ids by token string.
    pub(super) vocab: Map<String, Value>,
    /// Merges as pairs of token strings, in merge order.
    pub(super) merges: Vec<Value>,
    /// Whether merges are skipped for a pre-token that is itself a token.
    pub(super) ignore_merges: bool,
    pub(super) normalizer: Value,
    pub(super) pre_tokenizer: Value,
    pub(super) post_processor: Value,
    pub(super) added_tokens: Vec<Value>,
}

impl ByteLevelParts {
    pub(super) fn into_json(self) -> Value {
        let Self { vocab, merges, ignore_merges, .. } = self;
        json!({
            "version": "1.0", "truncation": null, "padding": null,
            "added_tokens": self.added_tokens,
            "normalizer": self.normalizer,
            "pre_tokenizer": self.pre_tokenizer,
            "post_processor": self.post_processor,
            "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true,
                "use_regex": true},
            "model": {"type": "BPE", "dropout": null, "unk_token": null,
                "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false,
                "byte_fallback": false, "ignore_merges": ignore_merges, "vocab": vocab,
                "merges": merges},
        })
    }
}

/// Returns the pre-tokenizer that splits a text by `pattern`.
pub(super) fn split_by(pattern: &str, add_prefix_space: bool) -> Value {
    json!({"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false},
        {"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": true,
            "use_regex": false},
    ]})
}
