//! Reads the members of a format object; unread members are errors.

use super::StructuralTagError;
use crate::ebnf::REPEAT_MAX;
use serde_json::{Map, Value};

/// Maximum number of entries in a list.
const LIST_MAX: usize = 512;

/// Members of one JSON object of a structural tag, with a record of which ones have been read.
pub(super) struct FormatFields<'a> {
    members: &'a Map<String, Value>,
    read: Vec<&'static str>,
    path: String,
}

impl<'a> FormatFields<'a> {
    /// Returns the members of the JSON object `value`; `path` is its path in errors.
    pub(super) fn of(value: &'a Value, path: &str) -> Result<Self, StructuralTagError> {
        match value {
            Value::Object(members) => Ok(Self { members, read: Vec::new(), path: path.to_owned() }),
            _ => Err(StructuralTagError::new(path, "must be an object")),
        }
    }

    /// Returns the path of the member `name`.
    pub(super) fn path(&self, name: &str) -> String {
        match self.path.as_str() {
            "" => name.to_owned(),
            path => format!("{path}.{name}"),
        }
    }

    /// Returns the member `name` and records that it has been read; null counts as absent.
    pub(super) fn take(&mut self, name: &'static str) -> Option<&'a Value> {
        self.read.push(name);
        self.members.get(name).filter(|value| !value.is_null())
    }

    pub(super) fn required(&mut self, name: &'static str) -> Result<&'a Value, StructuralTagError> {
        let path = self.path(name);
        self.take(name).ok_or_else(|| StructuralTagError::new(path, "is missing"))
    }

    pub(super) fn optional_text(
        &mut self,
        name: &'static str,
    ) -> Result<Option<&'a str>, StructuralTagError> {
        let path = self.path(name);
        let text = |value: &'a Value| {
            value.as_str().ok_or_else(|| StructuralTagError::new(path, "must be a string"))
        };
        self.take(name).map(text).transpose()
    }

    pub(super) fn text(&mut self, name: &'static str) -> Result<&'a str, StructuralTagError> {
        let path = self.path(name);
        self.optional_text(name)?.ok_or_else(|| StructuralTagError::new(path, "is missing"))
    }

    pub(super) fn flag(&mut self, name: &'static str) -> Result<bool, StructuralTagError> {
        match self.take(name) {
            None => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(_) => Err(StructuralTagError::new(self.path(name), "must be a boolean")),
        }
    }

    /// Returns a repetition count; -1 means unlimited (`None`).
    pub(super) fn count(&mut self, name: &'static str) -> Result<Option<u32>, StructuralTagError> {
        let path = self.path(name);
        match self.required(name)?.as_i64() {
            Some(-1) => Ok(None),
            Some(number) if (0..=i64::from(REPEAT_MAX)).contains(&number) => {
                Ok(Some(number as u32))
            }
            _ => {
                let message = format!("must be an integer from 0 to {REPEAT_MAX}, or -1");
                Err(StructuralTagError::new(path, message))
            }
        }
    }

    /// Returns the token id of a `token` format, in Lark syntax.
    pub(super) fn token(&mut self) -> Result<String, StructuralTagError> {
        const NAME: &str = "token";
        let path = self.path(NAME);
        match self.required(NAME)? {
            Value::Number(id) if id.as_u64().is_some_and(|id| u32::try_from(id).is_ok()) => {
                Ok(format!("<[{id}]>"))
            }
            Value::String(_) => {
                let message = "texts of tokens are not supported here; give the id of the token";
                Err(StructuralTagError::new(path, message))
            }
            _ => Err(StructuralTagError::new(path, "must be the id of a token")),
        }
    }

    pub(super) fn list(&mut self, name: &'static str) -> Result<&'a [Value], StructuralTagError> {
        let path = self.path(name);
        match self.required(name)? {
            Value::Array(list) if (1..=LIST_MAX).contains(&list.len()) => Ok(list),
            Value::Array(list) => {
                let message = format!("must have 1 to {LIST_MAX} entries, got {}", list.len());
                Err(StructuralTagError::new(path, message))
            }
            _ => Err(StructuralTagError::new(path, "must be a list")),
        }
    }

    /// Returns a list of non-empty strings; an absent list counts as empty.
    pub(super) fn texts(&mut self, name: &'static str) -> Result<Vec<String>, StructuralTagError> {
        let list = match self.take(name) {
            None => return Ok(Vec::new()),
            Some(Value::Array(list)) if list.is_empty() => return Ok(Vec::new()),
            Some(_) => self.list(name)?,
        };
        let text = |(index, value): (usize, &Value)| match value.as_str() {
            Some(text) if !text.is_empty() => Ok(text.to_owned()),
            _ => {
                let path = format!("{}[{index}]", self.path(name));
                Err(StructuralTagError::new(path, "must be a string that is not empty"))
            }
        };
        list.iter().enumerate().map(text).collect()
    }

    /// Rejects an option whose effect the grammar cannot express, unless it has its default value.
    pub(super) fn reject(
        &mut self,
        name: &'static str,
        is_default: impl Fn(&Value) -> bool,
    ) -> Result<(), StructuralTagError> {
        match self.take(name) {
            Some(value) if !is_default(value) => {
                Err(StructuralTagError::new(self.path(name), "is not supported"))
            }
            _ => Ok(()),
        }
    }

    /// Checks that all members have been read.
    ///
    /// Errors: an unread member.
    pub(super) fn finish(&self) -> Result<(), StructuralTagError> {
        let is_unknown = |name: &&String| !self.read.iter().any(|read| read == name);
        match self.members.keys().find(is_unknown) {
            None => Ok(()),
            Some(name) => Err(StructuralTagError::new(self.path(name), "unknown key")),
        }
    }
}
