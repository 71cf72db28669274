//! Typed access to JSON objects: an accessor returns a valid value, "absent", or an error that names the file
//! and the field.
//!
//! An explicit `null` counts as absent, because published configuration files contain such fields.

use super::ModelConfigError;
use super::config_overrides::apply_overrides;
use serde_json::{Map, Value};
use std::fs;
use std::path::{Path, PathBuf};

/// Size limit of a configuration file in bytes, far above the size of any published `config.json`.
const FILE_LIMIT_BYTES: u64 = 16 << 20;

/// JSON object of a configuration file. `path` is the path of the file and `prefix` is the path of the object
/// in the file; both are used in error messages.
#[derive(Debug, Clone)]
pub(crate) struct JsonFields {
    path: PathBuf,
    prefix: String,
    map: Map<String, Value>,
    /// Names of the fields that were copied from the outermost object of the file; error messages name these
    /// fields without `prefix`.
    inherited: Vec<&'static str>,
}

impl JsonFields {
    pub(crate) fn read(path: &Path) -> Result<Self, ModelConfigError> {
        let io = |error| ModelConfigError::Io { path: path.to_owned(), error };
        let bytes = fs::metadata(path).map_err(io)?.len();
        if bytes > FILE_LIMIT_BYTES {
            let (path, limit) = (path.to_owned(), FILE_LIMIT_BYTES);
            return Err(ModelConfigError::TooLarge { path, bytes, limit });
        }
        Self::parse(path, &fs::read(path).map_err(io)?)
    }

    pub(crate) fn parse(path: &Path, text: &[u8]) -> Result<Self, ModelConfigError> {
        let map = serde_json::from_slice(text)
            .map_err(|e| ModelConfigError::Json { path: path.to_owned(), detail: e.to_string() })?;
        Ok(Self { path: path.to_owned(), prefix: String::new(), map, inherited: Vec::new() })
    }

    /// Applies the overrides of `--hf-overrides` and returns the result.
    pub(crate) fn with(mut self, overrides: &Map<String, Value>) -> Self {
        apply_overrides(&mut self.map, overrides);
        self
    }

    /// Returns all fields.
    pub(crate) fn into_map(self) -> Map<String, Value> {
        self.map
    }

    /// Creates an object without fields, used if the optional file `path` does not exist.
    pub(crate) fn absent(path: &Path) -> Self {
        let (prefix, map) = (String::new(), Map::new());
        Self { path: path.to_owned(), prefix, map, inherited: Vec::new() }
    }

    /// Replaces the fields `inherited` by the fields of the same names of the outermost object `outer`, and
    /// returns the result.
    pub(crate) fn inheriting(mut self, outer: &Self, inherited: Vec<&'static str>) -> Self {
        for field in &inherited {
            match outer.value(field) {
                Some(value) => drop(self.map.insert((*field).to_owned(), value.clone())),
                None => drop(self.map.remove(*field)),
            }
        }
        self.inherited = inherited;
        self
    }

    pub(crate) fn value(&self, field: &str) -> Option<&Value> {
        self.map.get(field).filter(|v| !v.is_null())
    }

    /// Whether the object has the field `field` with the value null.
    pub(crate) fn is_null(&self, field: &str) -> bool {
        self.map.get(field).is_some_and(Value::is_null)
    }

    /// Names of all fields whose value is not null.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.map.iter().filter(|(_, value)| !value.is_null()).map(|(name, _)| name.as_str())
    }

    pub(crate) fn object(&self, field: &str) -> Result<Option<Self>, ModelConfigError> {
        match self.value(field) {
            None => Ok(None),
            Some(Value::Object(map)) => {
                let prefix = format!("{}.", self.full(field));
                let (path, map) = (self.path.clone(), map.clone());
                Ok(Some(Self { path, prefix, map, inherited: Vec::new() }))
            }
            Some(other) => Err(self.wrong(field, "an object", other)),
        }
    }

    /// Reads the required field `field`, an integer in `1..=limit`.
    pub(crate) fn size(&self, field: &str, limit: u64) -> Result<usize, ModelConfigError> {
        self.size_or_none(field, limit)?.ok_or_else(|| self.missing(field))
    }

    pub(crate) fn size_or_none(
        &self,
        field: &str,
        limit: u64,
    ) -> Result<Option<usize>, ModelConfigError> {
        let Some(value) = self.value(field) else { return Ok(None) };
        match value.as_u64() {
            Some(n) if (1..=limit).contains(&n) => Ok(Some(n as usize)),
            _ => Err(self.wrong(field, &format!("a whole number from 1 to {limit}"), value)),
        }
    }

    /// Reads the field `field`, an integer in `0..=limit`.
    pub(crate) fn count_or_none(
        &self,
        field: &str,
        limit: u64,
    ) -> Result<Option<usize>, ModelConfigError> {
        let Some(value) = self.value(field) else { return Ok(None) };
        match value.as_u64() {
            Some(n) if n <= limit => Ok(Some(n as usize)),
            _ => Err(self.wrong(field, &format!("a whole number from 0 to {limit}"), value)),
        }
    }

    /// Reads the required field `field`, a finite number above 0.
    pub(crate) fn positive(&self, field: &str) -> Result<f64, ModelConfigError> {
        self.positive_or_none(field)?.ok_or_else(|| self.missing(field))
    }

    pub(crate) fn positive_or_none(&self, field: &str) -> Result<Option<f64>, ModelConfigError> {
        let Some(value) = self.value(field) else { return Ok(None) };
        match value.as_f64() {
            Some(x) if x.is_finite() && x > 0.0 => Ok(Some(x)),
            _ => Err(self.wrong(field, "a number above zero", value)),
        }
    }

    /// Reads the required field `field`, a list of finite numbers above 0.
    pub(crate) fn positive_numbers(&self, field: &str) -> Result<Vec<f64>, ModelConfigError> {
        let number = |v: &Value| v.as_f64().filter(|x| x.is_finite() && *x > 0.0);
        let list = self.list(field, "a list of numbers above zero", "a number above zero", number);
        list?.ok_or_else(|| self.missing(field))
    }

    /// Reads the optional field `field`, a finite number.
    pub(crate) fn number_or_none(&self, field: &str) -> Result<Option<f64>, ModelConfigError> {
        let Some(value) = self.value(field) else { return Ok(None) };
        match value.as_f64() {
            Some(x) if x.is_finite() => Ok(Some(x)),
            _ => Err(self.wrong(field, "a number", value)),
        }
    }

    pub(crate) fn flag(&self, field: &str, default: bool) -> Result<bool, ModelConfigError> {
        match self.value(field) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(self.wrong(field, "true or false", other)),
        }
    }

    pub(crate) fn text(&self, field: &str) -> Result<Option<&str>, ModelConfigError> {
        match self.value(field) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.wrong(field, "a string", other)),
        }
    }

    /// Reads the optional field `field`, a token id or a list of token ids; returns an empty list if the
    /// field is absent.
    pub(crate) fn tokens(&self, field: &str) -> Result<Vec<u32>, ModelConfigError> {
        let id = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok());
        if let Some(id) = self.value(field).and_then(id) {
            return Ok(vec![id]);
        }
        let list = self.list(field, "a token id or a list of token ids", "a token id", id);
        Ok(list?.unwrap_or_default())
    }

    pub(crate) fn strings(&self, field: &str) -> Result<Option<Vec<&str>>, ModelConfigError> {
        self.list(field, "a list of strings", "a string", Value::as_str)
    }

    /// Reads the optional field `field`, a list; `read` returns `None` for invalid entries. `list` and `entry` describe
    /// a valid list and a valid entry.
    ///
    /// Errors: the field is not a list, or an entry is invalid; the error contains the index of the entry.
    pub(crate) fn list<'a, T>(
        &'a self,
        field: &str,
        list: &str,
        entry: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<Vec<T>>, ModelConfigError> {
        let Some(value) = self.value(field) else { return Ok(None) };
        let Some(entries) = value.as_array() else { return Err(self.wrong(field, list, value)) };
        let read = |(index, value)| {
            read(value).ok_or_else(|| self.wrong(&entry_name(field, index), entry, value))
        };
        entries.iter().enumerate().map(read).collect::<Result<_, _>>().map(Some)
    }

    pub(crate) fn missing(&self, field: &str) -> ModelConfigError {
        ModelConfigError::Missing { path: self.path.clone(), field: self.full(field) }
    }

    pub(crate) fn wrong(&self, field: &str, expected: &str, found: &Value) -> ModelConfigError {
        let (path, field) = (self.path.clone(), self.full(field));
        ModelConfigError::WrongType {
            path,
            field,
            expected: expected.to_owned(),
            found: excerpt(found),
        }
    }

    /// Creates the error for the field `field`, whose value is well-formed but not supported.
    pub(crate) fn unsupported(&self, field: &str, why: &str) -> ModelConfigError {
        let found = self.map.get(field).map_or_else(|| "its absence".to_owned(), excerpt);
        let (path, field) = (self.path.clone(), self.full(field));
        ModelConfigError::Unsupported { path, field, found, why: why.to_owned() }
    }

    /// Creates the error for entry `index` of the list in the field `field`. The entry is well-formed but not
    /// supported.
    pub(crate) fn unsupported_entry(
        &self,
        field: &str,
        index: usize,
        why: &str,
    ) -> ModelConfigError {
        let list = self.map.get(field).and_then(Value::as_array);
        let entry = list.and_then(|list| list.get(index));
        ModelConfigError::Unsupported {
            path: self.path.clone(),
            field: self.full(&entry_name(field, index)),
            found: entry.map_or_else(|| "its absence".to_owned(), excerpt),
            why: why.to_owned(),
        }
    }

    pub(crate) fn contradiction(&self, field: &str, detail: String) -> ModelConfigError {
        ModelConfigError::Contradiction { path: self.path.clone(), field: self.full(field), detail }
    }

    /// Rejects fields that are not in `known`: a field that is not read may change the output of the model.
    pub(crate) fn reject_unknown(&self, known: &[&str]) -> Result<(), ModelConfigError> {
        match self.names().find(|name| !known.contains(name)) {
            None => Ok(()),
            Some(name) => {
                let why = format!("the known fields are {}", known.join(", "));
                Err(self.unsupported(name, &why))
            }
        }
    }

    /// Rejects two spellings of one setting that have different values: `spelling` in this object and
    /// `other_spelling` in `other`.
    pub(crate) fn reject_disagreement(
        &self,
        spelling: &str,
        other: &Self,
        other_spelling: &str,
    ) -> Result<(), ModelConfigError> {
        let (Some(value), Some(other_value)) = (self.value(spelling), other.value(other_spelling))
        else {
            return Ok(());
        };
        let is_equal = match (value.as_f64(), other_value.as_f64()) {
            (Some(value), Some(other_value)) => value == other_value,
            _ => value == other_value,
        };
        if is_equal {
            return Ok(());
        }
        let (found, other_found) = (excerpt(value), excerpt(other_value));
        let other_field = other.full(other_spelling);
        let detail = format!("{found} disagrees with `{other_field}`, which is {other_found}");
        Err(self.contradiction(spelling, detail))
    }

    pub(crate) fn unknown_architecture(&self, found: &str, supported: String) -> ModelConfigError {
        ModelConfigError::Architecture {
            path: self.path.clone(),
            found: found.to_owned(),
            supported,
        }
    }

    fn full(&self, field: &str) -> String {
        let name = field.split('[').next().unwrap_or_default();
        let prefix = if self.inherited.contains(&name) { "" } else { &self.prefix };
        format!("{prefix}{field}")
    }
}

/// Name of an entry of the list in the field `field`, for error messages.
fn entry_name(field: &str, index: usize) -> String {
    format!("{field}[{index}]")
}

/// JSON text of a value for an error message, truncated so that the message stays on one line.
fn excerpt(value: &Value) -> String {
    const LIMIT_CHARS: usize = 80;
    let text = value.to_string();
    if text.chars().count() <= LIMIT_CHARS {
        return text;
    }
    text.chars().take(LIMIT_CHARS).chain("...".chars()).collect()
}
