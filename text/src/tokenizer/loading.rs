//! Loads a tokenizer and the files next to it.

use super::super::added_tokens::{AddedTokenMatcher, IdentifiedAddedToken};
use super::super::declared_tokens::DeclaredSpecialTokens;
use super::super::error::TextLoadError;
use super::super::panic_guard::catch_panic;
use super::super::post_processor::PostProcessorTokens;
use super::super::text_memory::{TEXT_MEMORY_DEFAULT, TextMemoryBudget};
use super::super::token_count_bound::TokenCountBound;
use super::super::token_table::{TokenTable, VocabularyString};
use super::super::tokenizer_files::TokenizerDefinition;
use super::super::tokenizer_windows::WindowBoundaryRules;
use super::{LIBRARY_NAME, Tokenizer};
use protocol::Token;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;

/// File with the fields of the model's architecture; the tokenizer reads its EOS ids, class and model type.
const MODEL_CONFIG_FILE: &str = "config.json";

/// Maximum number of EOS token ids.
const EOS_MAX: usize = 64;

/// Maximum bytes of memory that the `tokenizers` crate takes per byte of a text in which every byte may be a
/// word.
const BYTES_PER_TEXT_BYTE: u64 = 320;

/// Maximum bytes of memory that the `tokenizers` crate takes per byte of a text that it treats as one word,
/// measured by `tests/e2e/http/memory_amplification.rs`.
const BYTES_PER_WORD_BYTE: u64 = 176;

/// Maximum vocabulary size; larger vocabularies are rejected at load, because tables have an entry per id.
const VOCABULARY_MAX: usize = 1 << 22;

/// Reads a file; `None` if it does not exist.
pub(crate) fn read_file(path: &Path) -> Result<Option<Vec<u8>>, TextLoadError> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(TextLoadError::Read { path: path.to_owned(), source }),
    }
}

pub(crate) fn read_json(path: &Path) -> Result<Option<Value>, TextLoadError> {
    let Some(bytes) = read_file(path)? else { return Ok(None) };
    let json = serde_json::from_slice(&bytes);
    json.map(Some)
        .map_err(|e| TextLoadError::Invalid { path: path.to_owned(), reason: e.to_string() })
}

/// Loads the tokenizer with the `tokenizers` crate, and checks that it can encode a text.
fn read_by_library(
    bytes: &[u8],
    declared: &DeclaredSpecialTokens,
    file: &str,
) -> Result<tokenizers::Tokenizer, String> {
    let mut inner =
        tokenizers::Tokenizer::from_bytes(bytes).map_err(|e| format!("not a tokenizer: {e}"))?;
    // The file contains the truncation and padding settings of training; transformers clears both before
    // encoding a prompt.
    inner.with_truncation(None).map_err(|e| e.to_string())?;
    inner.with_padding(None);
    declared.add_to(&mut inner, file)?;
    check_added(&inner)?;
    Ok(inner)
}

/// Checks that the vocabulary contains the token ids that the post-processor adds to every text:
/// `tokenizer.json` lists these ids separately.
fn check_added(inner: &tokenizers::Tokenizer) -> Result<(), String> {
    let added = inner.encode("", true).map_err(|e| e.to_string())?;
    match added.get_ids().iter().find(|&&id| inner.id_to_token(id).is_none()) {
        Some(id) => Err(format!("the post-processor adds id {id}, which is not in the vocabulary")),
        None => Ok(()),
    }
}

/// Checks the ids of `added_tokens`. The `tokenizers` crate ignores the id of an added token that the
/// vocabulary contains under another id; it then gives all later added tokens ids that differ from those used
/// in training.
fn check_added_ids(json: &Value, inner: &tokenizers::Tokenizer) -> Result<(), String> {
    for token in json["added_tokens"].as_array().into_iter().flatten() {
        let (Some(id), Some(content)) = (token["id"].as_u64(), token["content"].as_str()) else {
            continue;
        };
        let found = inner.token_to_id(content);
        if found.map(u64::from) != Some(id) {
            let found = found.map_or_else(|| "no id".to_owned(), |id| format!("id {id}"));
            return Err(format!(
                "added_tokens: {content:?} has id {id}, but {found} in the vocabulary"
            ));
        }
    }
    Ok(())
}

/// Returns, for each id, the token's string in `tokenizer.json` and whether the token is special.
fn tokens_by_id(inner: &tokenizers::Tokenizer) -> Result<Vec<Option<VocabularyString>>, String> {
    let vocabulary = inner.get_vocab(true);
    let size = vocabulary.values().max().map_or(0, |&id| id as usize + 1);
    if size > VOCABULARY_MAX {
        return Err(format!("the largest id is {}; at most {VOCABULARY_MAX} ids", size - 1));
    }
    let added = inner.get_added_tokens_decoder();
    let mut tokens = vec![None; size];
    for (text, id) in vocabulary {
        tokens[id as usize] = Some(VocabularyString { text, is_special: false });
    }
    for (id, token) in added {
        if let Some(slot) = tokens.get_mut(id as usize) {
            *slot = Some(VocabularyString { text: token.content, is_special: token.special });
        }
    }
    Ok(tokens)
}

/// Returns the EOS token ids: `own`, the EOS id of the tokenizer, then the ids of `generation_config.json`
/// and those of `model_config`, the fields of `config.json`.
fn eos_ids(
    dir: &Path,
    own: Option<Token>,
    model_config: &Value,
) -> Result<Vec<Token>, TextLoadError> {
    let mut ids: Vec<Token> = own.into_iter().collect();
    let path = dir.join("generation_config.json");
    let generation_config = read_json(&path)?.unwrap_or(Value::Null);
    for (path, json) in [(path, &generation_config), (dir.join(MODEL_CONFIG_FILE), model_config)] {
        let invalid = |reason: &str| TextLoadError::Invalid {
            path: path.clone(),
            reason: format!("eos_token_id: {reason}"),
        };
        let listed = match &json["eos_token_id"] {
            Value::Null => continue,
            Value::Array(list) => list.clone(),
            one => vec![one.clone()],
        };
        for id in &listed {
            let id = id.as_u64().and_then(|id| Token::try_from(id).ok());
            ids.push(id.ok_or_else(|| invalid("not an id or a list of ids"))?);
        }
        if listed.len() > EOS_MAX {
            return Err(invalid(&format!("{} ids; at most {EOS_MAX}", listed.len())));
        }
    }
    let mut seen = BTreeSet::new();
    ids.retain(|&id| seen.insert(id));
    Ok(ids)
}

impl Tokenizer {
    /// Loads the first of `TOKENIZER_FILES` that exists, the special tokens declared in the files next to it,
    /// and the EOS ids from `generation_config.json` and `config.json`, if these files exist.
    ///
    /// Errors: a file is missing or invalid; the error names the file and the cause.
    pub fn load(dir: &Path) -> Result<Self, TextLoadError> {
        let model_config = read_json(&dir.join(MODEL_CONFIG_FILE))?.unwrap_or(Value::Null);
        Self::load_with(dir, &model_config)
    }

    /// Loads a tokenizer as `load` does, with the fields `model_config` in place of those of `config.json`.
    ///
    /// Errors: a file is missing or invalid; the error names the file and the cause.
    pub fn load_with(dir: &Path, model_config: &Value) -> Result<Self, TextLoadError> {
        let mut declared = DeclaredSpecialTokens::read(dir)?;
        let TokenizerDefinition { path, json, bytes } =
            TokenizerDefinition::read(dir, model_config, &mut declared)?;
        let invalid = |reason: String| TextLoadError::Invalid { path: path.clone(), reason };
        let file = path.file_name().unwrap_or_default().to_string_lossy();
        let inner = catch_panic(LIBRARY_NAME, || read_by_library(&bytes, &declared, &file));
        let inner = inner.and_then(|inner| inner).map_err(invalid)?;
        check_added_ids(&json, &inner).map_err(invalid)?;
        let tokens = tokens_by_id(&inner).map_err(invalid)?;
        let token_table = TokenTable::new(&tokens, &json["decoder"]).map_err(invalid)?;
        let added_token_list = IdentifiedAddedToken::list(&inner);
        let length_bound = TokenCountBound::new(&json, &tokens, &added_token_list, &token_table);
        let windows = WindowBoundaryRules::new(&json, &added_token_list);
        let post_processor =
            catch_panic(LIBRARY_NAME, || PostProcessorTokens::new(&inner)).ok().flatten();
        let one_word = windows.is_some() || json["pre_tokenizer"].is_null();
        let bytes_per_byte = if one_word && post_processor.is_some() {
            BYTES_PER_WORD_BYTE
        } else {
            BYTES_PER_TEXT_BYTE
        };
        let memory = TextMemoryBudget::new(TEXT_MEMORY_DEFAULT);
        let added_tokens = AddedTokenMatcher::new(&inner).map_err(invalid)?;
        let id = |text: &str| inner.token_to_id(text);
        let bos = declared.role("bos_token").and_then(id);
        let eos_ids = eos_ids(dir, declared.role("eos_token").and_then(id), model_config)?;
        let DeclaredSpecialTokens { config, roles: special_tokens, .. } = declared;
        let llama = config["tokenizer_class"].as_str().is_some_and(|c| c.starts_with("Llama"));
        let add_bos = if llama { config["add_bos_token"].as_bool() } else { None };
        Ok(Self {
            inner,
            added_tokens,
            token_table,
            length_bound,
            windows,
            post_processor,
            bytes_per_byte,
            memory,
            special_tokens,
            bos,
            add_bos,
            eos_ids,
            config,
        })
    }

    /// Adds the EOS ids `ids` of the model, which may be default values that its files do not contain.
    #[must_use]
    pub fn with_eos_ids(mut self, ids: &[Token]) -> Self {
        let added: Vec<Token> =
            ids.iter().copied().filter(|id| !self.eos_ids.contains(id)).collect();
        self.eos_ids.extend(added);
        self
    }
}
