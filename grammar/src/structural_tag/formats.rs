//! Converts the formats of structural tags to Lark expressions.

mod endings;

use super::fields::FormatFields;
use super::free_text::any_text;
use super::{DEPTH_MAX, EMPTY, EndTexts, FORMATS_MAX, LarkExpression, StructuralTagError};
use crate::ebnf::{EbnfGrammar, is_ebnf};
use crate::lark_text::literal;
use crate::limits::TEXT_BYTES_MAX;
use crate::llguidance_grammar::ENGINE_OPTIONS;
use endings::{ending_constant, ends_free};
use serde_json::{Value, json};
use std::fmt::Write as _;

/// Writes the rules and terminals of a Lark grammar.
#[derive(Debug, Default)]
pub(crate) struct TagGrammarWriter {
    pub(crate) rules: String,
    names: usize,
    formats: usize,
}

impl TagGrammarWriter {
    /// Adds a rule and returns its name.
    pub(super) fn rule(&mut self, body: &str) -> String {
        self.define("part", body)
    }

    /// Adds a terminal and returns its name.
    pub(super) fn terminal(&mut self, body: &str) -> String {
        self.define("TEXT", body)
    }

    fn define(&mut self, prefix: &str, body: &str) -> String {
        let name = self.reserve(prefix);
        self.add(&name, body);
        name
    }

    /// Returns a new name for a rule or terminal.
    pub(crate) fn reserve(&mut self, prefix: &str) -> String {
        let name = format!("{prefix}_{}", self.names);
        self.names += 1;
        name
    }

    /// Adds a rule or terminal with the given name.
    pub(crate) fn add(&mut self, name: &str, body: &str) {
        // Writing to a string cannot fail, so the result is ignored.
        let _ = writeln!(self.rules, "{name}: {body}");
    }

    /// Counts a format at depth `depth`.
    ///
    /// Errors: the structural tag is too large.
    fn count_format(&mut self, path: &str, depth: usize) -> Result<(), StructuralTagError> {
        self.formats += 1;
        if depth > DEPTH_MAX || self.formats > FORMATS_MAX {
            let message = format!(
                "a structural tag has at most {FORMATS_MAX} formats and a depth of {DEPTH_MAX}"
            );
            return Err(StructuralTagError::new(path, message));
        }
        if self.rules.len() > TEXT_BYTES_MAX {
            return Err(StructuralTagError::too_long(path));
        }
        Ok(())
    }

    /// Writes the Lark expression of a format that is followed by one of the texts `ends`.
    ///
    /// Errors: the path of an invalid value, or of a format that cannot be enforced.
    pub(super) fn closed(
        &mut self,
        format: &Value,
        path: &str,
        ends: &EndTexts,
        depth: usize,
    ) -> Result<LarkExpression, StructuralTagError> {
        self.count_format(path, depth)?;
        let mut fields = FormatFields::of(format, path)?;
        let depth = depth + 1;
        let expression = match fields.text("type")? {
            "any_text" => any_text(&mut fields, ends)?,
            "triggered_tags" => self.triggered_tags(&mut fields, ends, depth)?,
            "dispatch" => self.pattern_dispatch(&mut fields, ends, depth)?,
            "sequence" => self.sequence(&mut fields, ends, depth)?,
            "or" => self.choice(&mut fields, ends, depth)?,
            "tag" => self.tag(&mut fields, ends, depth)?,
            kind => {
                let bounded = self.bounded_kind(kind, &mut fields, depth)?;
                self.ended(bounded, ends)
            }
        };
        fields.finish()?;
        Ok(expression)
    }

    /// Writes the Lark expression of a format that must not end with free text, so that other formats can
    /// follow it.
    ///
    /// Errors: the errors of `closed`, or the format may end with free text.
    pub(super) fn bounded(
        &mut self,
        format: &Value,
        path: &str,
        depth: usize,
    ) -> Result<LarkExpression, StructuralTagError> {
        if ends_free(format) {
            let message = "free text must be the last part, or within a tag";
            return Err(StructuralTagError::new(path, message));
        }
        self.closed(format, path, &[], depth)
    }

    /// Writes the Lark expression of a format of type `kind`, which does not end with free text.
    fn bounded_kind(
        &mut self,
        kind: &str,
        fields: &mut FormatFields<'_>,
        depth: usize,
    ) -> Result<LarkExpression, StructuralTagError> {
        match kind {
            "const_string" => Ok(LarkExpression::Terminal(literal(fields.text("value")?))),
            "json_schema" => {
                fields.reject("style", |style| *style == "json")?;
                fields.reject("any_order", |flag| *flag == Value::Bool(false))?;
                let path = fields.path("json_schema");
                self.json(fields.required("json_schema")?, &path)
            }
            "regex" => {
                fields.reject("excludes", |list| *list == json!([]))?;
                Ok(LarkExpression::Terminal(regex(fields.text("pattern")?)))
            }
            "tags_with_separator" => self.tags_with_separator(fields, depth),
            "optional" | "plus" | "star" => {
                let path = fields.path("content");
                let content = self.bounded(fields.required("content")?, &path, depth)?;
                Ok(match kind {
                    "optional" => content.repeated(0, Some(1)),
                    "plus" => content.repeated(1, None),
                    _ => content.repeated(0, None),
                })
            }
            "repeat" => {
                let (Some(min), max) = (fields.count("min")?, fields.count("max")?) else {
                    return Err(StructuralTagError::new(fields.path("min"), "must not be -1"));
                };
                if max.is_some_and(|max| max < min) {
                    return Err(StructuralTagError::new(fields.path("max"), "is less than min"));
                }
                let path = fields.path("content");
                let content = self.bounded(fields.required("content")?, &path, depth)?;
                Ok(content.repeated(min, max))
            }
            "grammar" => {
                let path = fields.path("grammar");
                self.grammar(fields.text("grammar")?, path)
            }
            "token" => Ok(LarkExpression::Rule(fields.token()?)),
            kind => {
                let message = format!("formats of type {kind} are not supported");
                Err(StructuralTagError::new(fields.path("type"), message))
            }
        }
    }

    /// Writes a format of type `sequence`. Free text in the sequence may be followed by a constant text,
    /// which then ends the free text.
    fn sequence(
        &mut self,
        fields: &mut FormatFields<'_>,
        ends: &EndTexts,
        depth: usize,
    ) -> Result<LarkExpression, StructuralTagError> {
        let path = fields.path("elements");
        let elements = fields.list("elements")?;
        let (mut parts, mut index) = (Vec::new(), 0);
        while let Some(element) = elements.get(index) {
            let path = format!("{path}[{index}]");
            index += 1;
            let next = elements.get(index);
            let constant = next.and_then(|next| ending_constant(element, next));
            // A special token is not text, so it ends free text that precedes it.
            let precedes_token =
                element["type"] == "any_text" && next.is_some_and(|next| next["type"] == "token");
            parts.push(match (next, constant) {
                (None, _) => self.closed(element, &path, ends, depth)?,
                (Some(_), None) if precedes_token => self.closed(element, &path, &[], depth)?,
                (Some(_), None) => self.bounded(element, &path, depth)?,
                (Some(_), Some(constant)) => {
                    index += 1;
                    let free = self.closed(element, &path, &[constant.to_owned()], depth)?;
                    if index == elements.len() { self.ended(free, ends) } else { free }
                }
            });
        }
        Ok(self.concatenated(parts))
    }

    /// Writes a format of type `or`: a choice between formats.
    fn choice(
        &mut self,
        fields: &mut FormatFields<'_>,
        ends: &EndTexts,
        depth: usize,
    ) -> Result<LarkExpression, StructuralTagError> {
        let path = fields.path("elements");
        let mut alternatives = Vec::new();
        for (index, element) in fields.list("elements")?.iter().enumerate() {
            let one = self.closed(element, &format!("{path}[{index}]"), ends, depth)?;
            alternatives.push(self.rule_expression(one));
        }
        Ok(LarkExpression::Rule(format!("({})", alternatives.join(" | "))))
    }

    /// Writes a format of type `grammar`, whose text is in EBNF or Lark syntax.
    fn grammar(&mut self, text: &str, path: String) -> Result<LarkExpression, StructuralTagError> {
        if !is_ebnf(text) {
            return Ok(LarkExpression::Rule(self.rule(&format!("%lark {{\n{text}\n}}"))));
        }
        let grammar = EbnfGrammar::parse(text);
        let grammar = grammar.map_err(|error| StructuralTagError::new(path, error.to_string()))?;
        Ok(self.ebnf(&grammar))
    }

    /// Returns a Lark expression that matches any one of the expressions `parts`.
    pub(crate) fn alternatives(&mut self, parts: Vec<LarkExpression>) -> LarkExpression {
        let terminals: Option<Vec<&str>> = parts
            .iter()
            .map(|part| match part {
                LarkExpression::Terminal(text) => Some(text.as_str()),
                LarkExpression::Rule(_) => None,
            })
            .collect();
        if let Some(texts) = terminals {
            return LarkExpression::Terminal(format!("({})", texts.join(" | ")));
        }
        let rules: Vec<String> = parts.into_iter().map(|part| self.rule_expression(part)).collect();
        LarkExpression::Rule(format!("({})", rules.join(" | ")))
    }

    /// Writes an expression for the JSON texts that `schema` accepts.
    pub(super) fn json(
        &mut self,
        schema: &Value,
        path: &str,
    ) -> Result<LarkExpression, StructuralTagError> {
        if schema.get(ENGINE_OPTIONS).is_some() {
            let path = format!("{path}.{ENGINE_OPTIONS}");
            return Err(StructuralTagError::new(path, "is not supported"));
        }
        let schema = match schema {
            Value::Object(_) => schema.clone(),
            Value::Bool(true) => json!({}),
            _ => return Err(StructuralTagError::new(path, "must be a JSON schema")),
        };
        Ok(LarkExpression::Rule(self.rule(&format!("%json {schema}"))))
    }

    /// Concatenates expressions; adjacent terminals are merged into one.
    pub(crate) fn concatenated(&mut self, parts: Vec<LarkExpression>) -> LarkExpression {
        let mut joined: Vec<LarkExpression> = Vec::new();
        for part in parts {
            match (joined.last_mut(), part) {
                (Some(LarkExpression::Terminal(text)), LarkExpression::Terminal(next)) => {
                    if text == EMPTY {
                        *text = next;
                    } else if next != EMPTY {
                        text.push(' ');
                        text.push_str(&next);
                    }
                }
                (_, part) => joined.push(part),
            }
        }
        if joined.len() == 1
            && let Some(only) = joined.pop()
        {
            return only;
        }
        let parts: Vec<String> =
            joined.into_iter().map(|part| self.rule_expression(part)).collect();
        LarkExpression::Rule(parts.join(" "))
    }
}

/// Formats a regular expression for a Lark terminal, which is delimited by `/`.
fn regex(pattern: &str) -> String {
    if pattern.is_empty() {
        return EMPTY.to_owned();
    }
    let mut regex = String::new();
    let mut chars = pattern.chars();
    while let Some(c) = chars.next() {
        match c {
            '/' => regex.push_str("\\/"),
            '\\' => {
                regex.push('\\');
                regex.extend(chars.next());
            }
            c => regex.push(c),
        }
    }
    format!("/(?:{regex})/")
}
