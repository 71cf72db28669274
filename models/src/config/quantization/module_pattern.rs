//! Patterns that select modules by name, in the lists of modules of `quantization_config`.

use super::super::ModelConfigError;
use super::super::json_fields::JsonFields;
use regex::Regex;

/// Entry in a list of modules: a module name, `re:` followed by a regular expression that must match the
/// beginning of the module name (as Python's `re.match`), or a glob with `*` and `?` that must match the whole
/// name.
#[derive(Debug, Clone)]
pub struct ModulePattern {
    entry: String,
    pattern: Option<Regex>,
}

impl ModulePattern {
    /// Parses an entry that is a name or a regular expression.
    ///
    /// Errors: the regular expression is invalid or uses look-around, which is not supported.
    pub fn new(entry: &str) -> Result<Self, regex::Error> {
        let pattern = entry.strip_prefix("re:").map(|p| Regex::new(&format!("^(?:{p})")));
        Ok(Self { entry: entry.to_owned(), pattern: pattern.transpose()? })
    }

    /// Parses an entry that is a name or a glob with `*` and `?`.
    ///
    /// Errors: the entry is too long for a regular expression.
    pub fn glob(entry: &str) -> Result<Self, regex::Error> {
        let part = |c: char| match c {
            '*' => ".*".to_owned(),
            '?' => ".".to_owned(),
            c => regex::escape(&c.to_string()),
        };
        let is_glob = entry.contains(['*', '?']);
        let text: String = entry.chars().map(part).collect();
        let pattern = is_glob.then(|| Regex::new(&format!("^{text}$"))).transpose()?;
        Ok(Self { entry: entry.to_owned(), pattern })
    }

    /// Whether the pattern matches the module `name`: the entry equals the name, or is a regular expression or
    /// a glob that matches.
    pub(super) fn selects(&self, name: &str) -> bool {
        self.pattern.as_ref().map_or(name == self.entry, |pattern| pattern.is_match(name))
    }

    /// Whether the pattern matches the module `name` or, if it is a name, is a parent module or a suffix of the
    /// name.
    pub(super) fn covers(&self, name: &str) -> bool {
        let is_suffix = || name.strip_suffix(&self.entry).is_some_and(|rest| rest.ends_with('.'));
        let is_parent = || name.strip_prefix(&self.entry).is_some_and(|rest| rest.starts_with('.'));
        self.selects(name) || (self.pattern.is_none() && (is_suffix() || is_parent()))
    }

    /// Reads the list `field` with `parse`; empty if the field is absent.
    pub(super) fn list(
        fields: &JsonFields,
        field: &str,
        parse: fn(&str) -> Result<Self, regex::Error>,
    ) -> Result<Vec<Self>, ModelConfigError> {
        let invalid_pattern =
            |_| fields.unsupported(field, "valid regular expressions without look-around are");
        let entries = fields.strings(field)?.unwrap_or_default().into_iter();
        entries.map(|entry| parse(entry).map_err(invalid_pattern)).collect()
    }
}

impl PartialEq for ModulePattern {
    fn eq(&self, other: &Self) -> bool {
        self.entry == other.entry
    }
}

impl Eq for ModulePattern {}
