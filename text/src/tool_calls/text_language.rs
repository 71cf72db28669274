//! Converts the strings that a JSON schema accepts to a terminal of a Lark grammar.

use super::schema_refs::target;
use grammar::TEXT_BYTES_MAX;
use grammar::lark_text::literal;
use serde_json::Value;

/// Maximum number of schemas visited to build one terminal; needed because `$ref` references may be cyclic.
const SCHEMAS_VISITED_MAX: u32 = 256;
/// Keywords for which the generated terminals may be long.
const LONG_KEYWORDS: &[&str] = &["oneOf", "anyOf", "allOf", "enum", "const", "pattern"];
/// Terminal of all strings.
const ANY: &str = "/(?s:.*)/";

/// Builds terminals for the parts of one schema.
pub(super) struct SchemaTerminalBuilder<'a> {
    root: &'a Value,
    left: u32,
}

impl<'a> SchemaTerminalBuilder<'a> {
    /// Creates a builder for parts of the schema `root`.
    pub(super) fn new(root: &'a Value) -> Self {
        Self { root, left: SCHEMAS_VISITED_MAX }
    }

    /// Returns a terminal that matches exactly the strings that `schema` accepts; `None` if `schema` accepts
    /// no string.
    ///
    /// Errors: the keyword that cannot be enforced.
    pub(super) fn of(&mut self, schema: &Value) -> Result<Option<String>, &'static str> {
        self.left = self.left.checked_sub(1).ok_or("$ref")?;
        if *schema == Value::Bool(false) || !allows_type(schema, "string") {
            return Ok(None);
        }
        let mut conjuncts = Vec::new();
        for values in
            [schema["enum"].as_array().cloned(), schema.get("const").map(|v| vec![v.clone()])]
        {
            let Some(values) = values else { continue };
            let texts: Vec<String> = values.iter().filter_map(Value::as_str).map(literal).collect();
            if texts.is_empty() {
                return Ok(None);
            }
            conjuncts.push(texts.join(" | "));
        }
        conjuncts.extend(assertions(schema)?);
        if schema.get("$ref").is_some() {
            let target = target(self.root, schema).ok_or("$ref")?;
            let Some(language) = self.of(target)? else { return Ok(None) };
            conjuncts.push(language);
        }
        for part in schema["allOf"].as_array().into_iter().flatten() {
            let Some(language) = self.of(part)? else { return Ok(None) };
            conjuncts.push(language);
        }
        for keyword in ["anyOf", "oneOf"] {
            let Some(choices) = schema[keyword].as_array() else { continue };
            let Some(language) = self.choice(keyword, choices)? else { return Ok(None) };
            conjuncts.push(language);
        }
        if let Some(excluded) = schema.get("not")
            && let Some(language) = self.of(excluded)?
        {
            conjuncts.push(format!("~({language})"));
        }
        if bytes(&conjuncts) > TEXT_BYTES_MAX {
            let keyword = LONG_KEYWORDS.iter().find(|keyword| schema.get(**keyword).is_some());
            return Err(keyword.unwrap_or(&"$ref"));
        }
        Ok(Some(intersection(&conjuncts)))
    }

    /// Returns the terminal of the strings that at least one of the schemas `choices` accepts, or, with
    /// `oneOf`, that exactly one of them accepts.
    fn choice(
        &mut self,
        keyword: &'static str,
        choices: &[Value],
    ) -> Result<Option<String>, &'static str> {
        let languages = choices.iter().map(|choice| self.of(choice));
        let languages: Vec<String> =
            languages.collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect();
        if languages.is_empty() {
            return Ok(None);
        }
        // The terminal for `oneOf` contains, for each alternative, a copy of the terminals of all
        // alternatives.
        let copies = if keyword == "anyOf" { 1 } else { languages.len() };
        if bytes(&languages) * copies > TEXT_BYTES_MAX {
            return Err(keyword);
        }
        Ok(Some(if keyword == "anyOf" { languages.join(" | ") } else { exactly_one(&languages) }))
    }
}

/// Returns the total length of the terminals in bytes.
fn bytes(terminals: &[String]) -> usize {
    terminals.iter().map(String::len).sum()
}

/// Returns the terminal of the strings that match all of `conjuncts`.
pub(super) fn intersection(conjuncts: &[String]) -> String {
    let mut parts = vec![ANY.to_owned()];
    parts.extend(conjuncts.iter().filter(|part| *part != ANY).map(|part| format!("({part})")));
    // The intersection includes the terminal of all strings, because the complement of a terminal contains
    // byte sequences that are not valid text.
    parts.join(" & ")
}

/// Returns the terminal of the strings that match exactly one of the terminals `languages`.
fn exactly_one(languages: &[String]) -> String {
    let one = |(at, language): (usize, &String)| {
        let others = languages.iter().enumerate().filter(|(other, _)| *other != at);
        let others = others.map(|(_, other)| format!("~({other})"));
        let conjuncts: Vec<String> = [format!("({language})")].into_iter().chain(others).collect();
        format!("({})", conjuncts.join(" & "))
    };
    languages.iter().enumerate().map(one).collect::<Vec<_>>().join(" | ")
}

/// Returns one terminal for each keyword that restricts strings.
fn assertions(schema: &Value) -> Result<Vec<String>, &'static str> {
    let mut terminals = Vec::new();
    if let Some(keyword) = ["if", "then", "else"].into_iter().find(|key| schema.get(*key).is_some())
    {
        return Err(keyword);
    }
    if let Some(pattern) = schema.get("pattern") {
        terminals.push(pattern_regex(pattern.as_str().ok_or("pattern")?));
    }
    if schema.get("minLength").is_some() || schema.get("maxLength").is_some() {
        let min = count(schema, "minLength")?.unwrap_or(0);
        let max = count(schema, "maxLength")?.map_or(String::new(), |max| max.to_string());
        terminals.push(format!("/(?s:.{{{min},{max}}})/"));
    }
    if let Some(format) = schema.get("format").and_then(Value::as_str)
        && let Some(regex) = format_regex(format)
    {
        terminals.push(format!("/{regex}/"));
    }
    Ok(terminals)
}

fn count(schema: &Value, keyword: &'static str) -> Result<Option<u64>, &'static str> {
    let Some(value) = schema.get(keyword) else { return Ok(None) };
    let whole = |n: f64| (n >= 0.0 && n.fract() == 0.0 && n < 1e9).then_some(n as u64);
    value.as_f64().and_then(whole).map(Some).ok_or(keyword)
}

/// Whether the `type` of `schema`, if it has one, contains `name`.
fn allows_type(schema: &Value, name: &str) -> bool {
    match &schema["type"] {
        Value::Null => true,
        Value::Array(names) => names.iter().any(|one| one == name),
        one => one == name,
    }
}

/// Converts the `pattern` of a schema, which may match anywhere in a string, to a terminal that matches the
/// whole string. Anchors are supported at the ends of the alternatives of the pattern.
fn pattern_regex(pattern: &str) -> String {
    let whole = |alternative: &str| {
        let (start, rest) = match alternative.strip_prefix('^') {
            Some(rest) => ("", rest),
            None => ("(?s:.*)", alternative),
        };
        let is_anchor =
            |rest: &&str| (rest.len() - rest.trim_end_matches('\\').len()).is_multiple_of(2);
        let (rest, end) = match rest.strip_suffix('$').filter(is_anchor) {
            Some(rest) => (rest, ""),
            None => (rest, "(?s:.*)"),
        };
        format!("{start}(?:{rest}){end}")
    };
    let alternatives: Vec<String> = alternatives(pattern).into_iter().map(whole).collect();
    format!("/{}/", ecma_regex(&alternatives.join("|")))
}

/// Splits a pattern at the `|` that are not inside a group or a character class.
fn alternatives(pattern: &str) -> Vec<&str> {
    let (mut parts, mut from, mut depth, mut in_class, mut escaped) =
        (Vec::new(), 0, 0_u32, false, false);
    for (at, c) in pattern.char_indices() {
        if std::mem::take(&mut escaped) {
            continue;
        }
        match c {
            '\\' => escaped = true,
            ']' => in_class = false,
            _ if in_class => {}
            '[' => in_class = true,
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            '|' if depth == 0 => {
                parts.push(&pattern[from..at]);
                from = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&pattern[from..]);
    parts
}

/// Converts a pattern with the ECMAScript classes `\d` and `\w` to the regex syntax of the grammar engine,
/// without the delimiters `/`.
fn ecma_regex(pattern: &str) -> String {
    let mut regex = String::new();
    let mut chars = pattern.chars();
    while let Some(c) = chars.next() {
        match c {
            '/' => regex.push_str("\\/"),
            '\n' => regex.push_str("\\n"),
            '\r' => regex.push_str("\\r"),
            '\\' => match chars.next() {
                Some('d') => regex.push_str("[0-9]"),
                Some('D') => regex.push_str("[^0-9]"),
                Some('w') => regex.push_str("[0-9a-zA-Z_]"),
                Some('W') => regex.push_str("[^0-9a-zA-Z_]"),
                Some('/') => regex.push_str("\\/"),
                Some(escaped) => regex.extend(['\\', escaped]),
                None => regex.push_str("\\\\"),
            },
            c => regex.push(c),
        }
    }
    regex
}

/// Returns a regular expression that matches only `text`, without the delimiters `/`.
pub(super) fn regex_literal(text: &str) -> String {
    let mut regex = String::new();
    for c in text.chars() {
        if c.is_ascii_punctuation() && !matches!(c, '<' | '>' | '=' | ':' | '"' | '_') {
            regex.push('\\');
        }
        regex.push(c);
    }
    regex
}

/// Returns the regular expression of a common `format`; other formats are annotations and are not enforced.
fn format_regex(format: &str) -> Option<&'static str> {
    const DATE: &str = "[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))";
    Some(match format {
        "date" => DATE,
        "time" => {
            "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]+)?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
        }
        "date-time" => {
            "[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))[tT](?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]+)?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
        }
        "uuid" => "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
        "email" => {
            "[a-zA-Z0-9!#$%&'*+=?\\^_`{|}~-]+(?:\\.[a-zA-Z0-9!#$%&'*+=?\\^_`{|}~-]+)*@[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?(?:\\.[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?)*"
        }
        "ipv4" => {
            "(?:(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])\\.){3}(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
        }
        _ => return None,
    })
}

/// Whether `schema` accepts `value`, which is `null`, `true`, `false` or the empty string. A `pattern` is
/// assumed to reject the empty string.
pub(super) fn accepts_constant(root: &Value, schema: &Value, value: &Value) -> bool {
    accepts(root, schema, value, &mut { SCHEMAS_VISITED_MAX }) == Some(true)
}

/// Returns whether the keywords of `schema` without subschemas accept `value`.
fn own_keywords_accept(schema: &Value, value: &Value) -> bool {
    let name = match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        _ => "string",
    };
    let listed = schema["enum"].as_array().is_none_or(|values| values.contains(value));
    let constant = schema.get("const").is_none_or(|constant| constant == value);
    let long = !value.is_string()
        || schema.get("pattern").or(schema.get("format")).is_none()
            && schema["minLength"].as_f64().is_none_or(|min| min <= 0.0);
    allows_type(schema, name) && listed && constant && long
}

/// Returns whether `schema` accepts `value`; `None` if too many schemas were visited.
fn accepts(root: &Value, schema: &Value, value: &Value, left: &mut u32) -> Option<bool> {
    *left = left.checked_sub(1)?;
    let mut result = *schema != Value::Bool(false) && own_keywords_accept(schema, value);
    if schema.get("$ref").is_some() {
        result &= accepts(root, target(root, schema)?, value, left)?;
    }
    for part in schema["allOf"].as_array().into_iter().flatten() {
        result &= accepts(root, part, value, left)?;
    }
    for keyword in ["anyOf", "oneOf"] {
        let Some(choices) = schema[keyword].as_array() else { continue };
        let mut count = 0;
        for choice in choices {
            count += u32::from(accepts(root, choice, value, left)?);
        }
        result &= if keyword == "anyOf" { count > 0 } else { count == 1 };
    }
    if let Some(excluded) = schema.get("not") {
        result &= !accepts(root, excluded, value, left)?;
    }
    Some(result)
}
