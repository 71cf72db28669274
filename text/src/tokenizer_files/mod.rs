//! Files that define the tokenizer of a model folder. `tokenizer.json` is used directly; every other file is
//! converted to the format of `tokenizer.json` in the same way as in transformers, so that all tokenizers
//! share one code path.
//!
//! A file is converted only if the result is known to be exact for its tokenizer class: these files do not
//! contain the pre-tokenizer pattern, which is part of the code of the class.

mod byte_level;
mod post_processor_template;
mod ranked_vocabulary;
mod sentencepiece_conversion;
mod sentencepiece_model;
mod sentencepiece_text;
mod tekken;
mod tiktoken;
mod tokenizer_class;
mod vocab_merges;

use super::declared_tokens::DeclaredSpecialTokens;
use super::error::TextLoadError;
use super::tokenizer::read_file;
use protocol::Token;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Files that define a tokenizer, in order of precedence. `vocab.json` needs `merges.txt` next to it.
pub const TOKENIZER_FILES: [&str; 6] = [
    "tokenizer.json",
    "tekken.json",
    "tokenizer.model",
    "tiktoken.model",
    "qwen.tiktoken",
    "vocab.json",
];

/// Maximum length of a token in bytes. The limit exists because merges are found by trying all splits of each
/// token.
const TOKEN_BYTES_MAX: usize = 4 << 10;

/// Definition of a tokenizer in the form of `tokenizer.json`.
#[derive(Debug)]
pub(super) struct TokenizerDefinition {
    /// File that was read.
    pub(super) path: PathBuf,
    pub(super) json: Value,
    /// Text of `json`.
    pub(super) bytes: Vec<u8>,
}

/// Information about the tokenizer from the other files of a model folder.
struct ConversionContext<'a> {
    dir: &'a Path,
    /// Name of the tokenizer class without the suffix `Fast`; `None` if neither the tokenizer class nor the
    /// model type is known.
    class: Option<String>,
    /// Declared tokens; a conversion adds the roles that its tokenizer class defines.
    declared: &'a mut DeclaredSpecialTokens,
}

impl TokenizerDefinition {
    /// Reads the first of `TOKENIZER_FILES` that exists in `dir`, and adds the roles that its tokenizer class
    /// defines to `declared`. `model_config`: the fields of `config.json`.
    ///
    /// Errors: no such file exists; the file is invalid, or cannot be converted exactly.
    pub(super) fn read(
        dir: &Path,
        model_config: &Value,
        declared: &mut DeclaredSpecialTokens,
    ) -> Result<Self, TextLoadError> {
        for name in TOKENIZER_FILES {
            let path = dir.join(name);
            let Some(bytes) = read_file(&path)? else { continue };
            if name == "tokenizer.json" {
                let json = serde_json::from_slice(&bytes).map_err(|e| TextLoadError::Invalid {
                    path: path.clone(),
                    reason: e.to_string(),
                })?;
                return Ok(Self { path, json, bytes });
            }
            let class = tokenizer_class::of(&declared.config, model_config);
            let mut context = ConversionContext { dir, class, declared };
            let json = context.convert(name, &bytes);
            let bytes =
                json.as_ref().map_or_else(|_| Vec::new(), |json| json.to_string().into_bytes());
            return match json {
                Ok(json) => Ok(Self { path, json, bytes }),
                Err(reason) => Err(TextLoadError::Invalid { path, reason }),
            };
        }
        Err(TextLoadError::NoTokenizer(dir.to_owned()))
    }
}

impl ConversionContext<'_> {
    fn convert(&mut self, name: &str, contents: &[u8]) -> Result<Value, String> {
        match name {
            "tekken.json" => tekken::convert(contents, self),
            "vocab.json" => vocab_merges::convert(contents, self),
            _ if tiktoken::is_tiktoken(contents) => tiktoken::convert(contents, self),
            _ => sentencepiece_conversion::convert(contents, self),
        }
    }

    /// Returns the flag `name` of `tokenizer_config.json`.
    fn flag(&self, name: &str) -> Option<bool> {
        self.declared.config[name].as_bool()
    }

    /// Returns the error for a tokenizer class whose tokenizer file cannot be converted exactly.
    fn unsupported_class(&self) -> String {
        let class = self.class.as_deref().map_or_else(
            || "no known tokenizer_class".to_owned(),
            |class| format!("tokenizer_class {class}"),
        );
        format!(
            "{class}: this file cannot be converted exactly; write a tokenizer.json with transformers: \
             AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    }
}

/// Returns an entry of `added_tokens`.
fn added_token(id: Token, content: &str, special: bool) -> Value {
    json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": special})
}
