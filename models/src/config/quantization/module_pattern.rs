//! Patterns that select modules by name, in the lists of modules of `quantization_config`.

use super::super::ModelConfigError;
use super::super::json_fields::JsonFields;
use regex::Regex;

/// Entry in a list of modules: a module name, `re:` followed by a regular expression that must match the
/// beginning of the module name (as Python's `re.match`), or a glob (`*`, `?`, `[seq]`) that must match the
/// whole name.
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

    /// Parses an entry that is a name or a glob as in Python's `fnmatch`: `*`, `?`, `[seq]` and `[!seq]`.
    ///
    /// Errors: the entry is too long for a regular expression, or a range of a set is invalid.
    pub fn glob(entry: &str) -> Result<Self, regex::Error> {
        if !entry.contains(['*', '?', '[']) {
            return Ok(Self { entry: entry.to_owned(), pattern: None });
        }
        let (mut text, mut rest) = (String::new(), entry);
        while let Some(c) = rest.chars().next() {
            rest = &rest[c.len_utf8()..];
            match (c, set_end(rest)) {
                ('*', _) => text.push_str(".*"),
                ('?', _) => text.push('.'),
                ('[', Some(end)) => {
                    text.push_str(&character_class(&rest[..end]));
                    rest = &rest[end + 1..];
                }
                _ => text.push_str(&regex::escape(&c.to_string())),
            }
        }
        Ok(Self { entry: entry.to_owned(), pattern: Some(Regex::new(&format!("^{text}$"))?) })
    }

    /// Whether the pattern matches the module `name`: the entry equals the name, or is a regular expression or
    /// a glob that matches.
    pub(super) fn selects(&self, name: &str) -> bool {
        self.pattern.as_ref().map_or(name == self.entry, |pattern| pattern.is_match(name))
    }

    /// Whether the pattern matches the module `name`. An entry that is neither a regular expression nor a
    /// glob also matches its submodules, and modules whose dotted name ends with the entry.
    pub(super) fn covers(&self, name: &str) -> bool {
        let is_suffix = || name.strip_suffix(&self.entry).is_some_and(|rest| rest.ends_with('.'));
        let is_parent = || name.strip_prefix(&self.entry).is_some_and(|rest| rest.starts_with('.'));
        self.selects(name) || (self.pattern.is_none() && (is_suffix() || is_parent()))
    }

    /// Reads the list in the field `field` and parses each entry with `parse`; returns an empty list if the
    /// field is absent.
    pub(super) fn list(
        fields: &JsonFields,
        field: &str,
        parse: fn(&str) -> Result<Self, regex::Error>,
    ) -> Result<Vec<Self>, ModelConfigError> {
        const WHY: &str = "valid regular expressions without look-around are";
        let entries = fields.strings(field)?.unwrap_or_default().into_iter().enumerate();
        let parse = |(i, entry)| parse(entry).map_err(|_| fields.unsupported_entry(field, i, WHY));
        entries.map(parse).collect()
    }
}

/// Returns the index of the `]` that ends a character set of a glob. `text` starts after the `[` of the set.
/// As in `fnmatch`, a `]` directly after `[` or `[!` belongs to the set. `None` = no `]` ends the set, so the
/// `[` is an ordinary character.
fn set_end(text: &str) -> Option<usize> {
    let first = usize::from(text.starts_with('!'));
    let first = first + usize::from(text[first..].starts_with(']'));
    text[first..].find(']').map(|end| first + end)
}

/// Returns the regular expression for the character set `[chars]` of a glob.
fn character_class(chars: &str) -> String {
    let (negation, chars) = match chars.strip_prefix('!') {
        Some(chars) => ("^", chars),
        None => ("", chars),
    };
    let escape = |c: char| match c {
        c if c.is_ascii_punctuation() && c != '-' => format!("\\{c}"),
        c => c.to_string(),
    };
    format!("[{negation}{}]", chars.chars().map(escape).collect::<String>())
}

impl PartialEq for ModulePattern {
    fn eq(&self, other: &Self) -> bool {
        self.entry == other.entry
    }
}

impl Eq for ModulePattern {}

#[cfg(test)]
mod tests {
    use super::ModulePattern;

    #[test]
    fn globs_match_as_fnmatch_does() {
        let matches = |glob: &str, name: &str| ModulePattern::glob(glob).unwrap().selects(name);
        for (glob, name) in [
            ("lm_head", "lm_head"),
            ("*layers.[02].mlp*", "model.layers.2.mlp.up_proj"),
            ("model.layers.[!0-3].mlp", "model.layers.4.mlp"),
            ("a[]b]c", "a]c"),
            ("a[", "a["),
            ("a?c", "a.c"),
        ] {
            assert!(matches(glob, name), "{glob} {name}");
        }
        for (glob, name) in [
            ("*layers.[02].mlp*", "model.layers.1.mlp"),
            ("model.layers.[!0-3].mlp", "model.layers.3.mlp"),
            ("a[.]c", "abc"),
            ("a[^]c", "abc"),
            ("a.c", "abc"),
        ] {
            assert!(!matches(glob, name), "{glob} {name}");
        }
    }
}
