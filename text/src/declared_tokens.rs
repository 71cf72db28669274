//! Special tokens that the files next to `tokenizer.json` declare, read as transformers 5 does
//! (`PreTrainedTokenizerBase._from_pretrained`, `TokenizersBackend.__init__`).
//!
//! `added_tokens_decoder` of `tokenizer_config.json` defines the flags of added tokens. Without it,
//! `special_tokens_map.json` replaces the roles (`bos_token`, `eos_token`, ...) of `tokenizer_config.json`, and
//! `added_tokens.json` adds tokens. Every token with a role and every extra special token is special.

use super::error::TextLoadError;
use super::tokenizer::read_json;
use protocol::Token;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::Path;
use tokenizers::AddedToken;

const CONFIG_FILE: &str = "tokenizer_config.json";
const ROLES_FILE: &str = "special_tokens_map.json";
const ADDED_FILE: &str = "added_tokens.json";
/// JSON members that list special tokens without a role (a role is a name such as `bos_token`). The first
/// member name is current, the second is the legacy name.
const EXTRA_MEMBERS: [&str; 2] = ["extra_special_tokens", "additional_special_tokens"];

/// Special tokens that the files next to `tokenizer.json` declare.
#[derive(Debug, Default)]
pub(super) struct DeclaredSpecialTokens {
    /// Contents of `tokenizer_config.json`; null if there is none.
    pub(super) config: Value,
    /// Special tokens with a role, as pairs (role, token string); a role is a name such as `bos_token`.
    pub(super) roles: Vec<(String, String)>,
    /// Special tokens without a role such as `bos_token`.
    extra: Vec<String>,
    /// Added tokens by id.
    added: BTreeMap<Token, AddedToken>,
    /// File that defines `added`.
    added_file: &'static str,
}

/// JSON form of an added token in `added_tokens_decoder`.
#[derive(Deserialize)]
struct AddedTokenEntry {
    content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    normalized: Option<bool>,
    #[serde(default)]
    special: bool,
}

impl From<AddedTokenEntry> for AddedToken {
    fn from(entry: AddedTokenEntry) -> Self {
        let AddedTokenEntry { content, single_word, lstrip, rstrip, normalized, special } = entry;
        let normalized = normalized.unwrap_or(!special);
        Self { content, single_word, lstrip, rstrip, normalized, special }
    }
}

impl DeclaredSpecialTokens {
    /// Reads the files next to `tokenizer.json` in the folder `dir`; each of these files is optional.
    ///
    /// Errors: the error names the file and the member that is invalid.
    pub(super) fn read(dir: &Path) -> Result<Self, TextLoadError> {
        let config = read_json(&dir.join(CONFIG_FILE))?.unwrap_or(Value::Null);
        let mut declared = Self { added_file: CONFIG_FILE, ..Self::default() };
        let mut members = config.as_object().cloned().unwrap_or_default();
        let decoder = members.remove("added_tokens_decoder").filter(|value| !value.is_null());
        if decoder.is_none()
            && let Some(Value::Object(roles)) = read_json(&dir.join(ROLES_FILE))?
        {
            members.extend(roles);
        }
        declared.read_roles(&members);
        let invalid =
            |file: &str, reason: String| TextLoadError::Invalid { path: dir.join(file), reason };
        if let Some(decoder) = decoder {
            declared.added =
                added_tokens(decoder).map_err(|reason| invalid(CONFIG_FILE, reason))?;
        } else if let Some(ids) = read_json(&dir.join(ADDED_FILE))? {
            declared.added_file = ADDED_FILE;
            let ids: BTreeMap<String, Token> = serde_json::from_value(ids)
                .map_err(|error| invalid(ADDED_FILE, error.to_string()))?;
            declared.read_ids(ids);
        }
        declared.config = config;
        Ok(declared)
    }

    fn read_roles(&mut self, members: &Map<String, Value>) {
        for (name, value) in members.iter().filter(|(name, _)| name.ends_with("_token")) {
            if let Some(text) = token_string(value) {
                self.roles.push((name.clone(), text.to_owned()));
            }
        }
        let extra = EXTRA_MEMBERS.iter().find_map(|name| members.get(*name));
        match extra {
            Some(Value::Object(named)) => {
                let named = named.iter().filter_map(|(role, value)| {
                    token_string(value).map(|text| (role.clone(), text.to_owned()))
                });
                self.roles.extend(named);
            }
            Some(Value::Array(list)) => {
                self.extra.extend(list.iter().filter_map(token_string).map(str::to_owned));
            }
            _ => {}
        }
    }

    fn read_ids(&mut self, ids: BTreeMap<String, Token>) {
        let added = ids.into_iter().map(|(content, id)| {
            let special = self.is_special(&content);
            (id, AddedToken::from(content, special))
        });
        self.added = added.collect();
    }

    /// Whether the token string `content` is declared as a special token, with or without a role.
    fn is_special(&self, content: &str) -> bool {
        self.roles.iter().any(|(_, token)| token == content)
            || self.extra.iter().any(|token| token == content)
    }

    /// Returns the token string of a role, such as `bos_token`.
    pub(super) fn role(&self, name: &str) -> Option<&str> {
        self.roles.iter().find(|(role, _)| role == name).map(|(_, token)| token.as_str())
    }

    /// Adds the role `name` with the string `token`, the default of the tokenizer class, unless a file
    /// declares this role.
    pub(super) fn add_default_role(&mut self, name: &str, token: &str) {
        let is_declared = |members: &Value| members.get(name).is_some();
        if self.role(name).is_none() && !is_declared(&self.config) {
            self.roles.push((name.to_owned(), token.to_owned()));
        }
    }

    /// Returns the declared token with this id.
    pub(super) fn added_token(&self, id: Token) -> Option<&AddedToken> {
        self.added.get(&id)
    }

    /// Adds the declared tokens to the tokenizer that `file` defines. A token that `file` makes special
    /// remains special. A role whose token is not in the vocabulary is skipped: the model has no embedding
    /// row for the token.
    ///
    /// Errors: a declared token has a different id in `file`.
    pub(super) fn add_to(
        &self,
        inner: &mut tokenizers::Tokenizer,
        file: &str,
    ) -> Result<(), String> {
        let present = inner.get_added_tokens_decoder();
        let mut changed = Vec::new();
        for token in self.added.values() {
            let id = inner.token_to_id(&token.content);
            let found = id.and_then(|id| present.get(&id));
            let mut token = token.clone();
            token.special |=
                self.is_special(&token.content) || found.is_some_and(|found| found.special);
            if found != Some(&token) {
                changed.push(token);
            }
        }
        for content in self.roles.iter().map(|(_, token)| token).chain(&self.extra) {
            let Some(id) = inner.token_to_id(content) else { continue };
            let is_declared = self.added.values().any(|token| token.content == *content);
            match present.get(&id) {
                _ if is_declared => {}
                Some(found) if found.special => {}
                Some(found) => changed.push(AddedToken { special: true, ..found.clone() }),
                None => changed.push(AddedToken::from(content.clone(), true)),
            }
        }
        inner.add_tokens(&changed);
        match self.added.iter().find(|(id, token)| inner.token_to_id(&token.content) != Some(**id))
        {
            None => Ok(()),
            Some((id, token)) => {
                let found = inner.token_to_id(&token.content);
                let found = found.map_or_else(|| "no id".to_owned(), |id| format!("id {id}"));
                let (declaring, content) = (self.added_file, &token.content);
                Err(format!("{declaring} gives the token {content:?} id {id}, {file} {found}"))
            }
        }
    }
}

/// Reads `added_tokens_decoder`, a JSON object that maps token ids to added tokens.
fn added_tokens(decoder: Value) -> Result<BTreeMap<Token, AddedToken>, String> {
    let invalid = |error: serde_json::Error| format!("added_tokens_decoder: {error}");
    let entries: BTreeMap<String, AddedTokenEntry> =
        serde_json::from_value(decoder).map_err(invalid)?;
    let added = entries.into_iter().map(|(id, entry)| match id.parse() {
        Ok(id) => Ok((id, entry.into())),
        Err(_) => Err(format!("added_tokens_decoder: {id:?} is not an id")),
    });
    added.collect()
}

/// Returns the text of a token that is given as a string or as `{"content": string}`.
fn token_string(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value["content"].as_str())
}
