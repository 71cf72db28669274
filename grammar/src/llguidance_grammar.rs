//! Converts a constraint to a grammar for llguidance, and enforces limits on length, nesting and cost.

use super::compile::GrammarError;
use super::constraint::{GrammarSpec, JsonWhitespace, OutputConstraint};
use super::limits::{NESTING_MAX, SEPARATE_CHOICES_MAX, TEXT_BYTES_MAX};
use super::{embedded_schemas, number_keywords, schema, schema_cost};
use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use serde_json::{Value, json};

/// Key of the llguidance options in a JSON schema.
pub(super) const ENGINE_OPTIONS: &str = "x-guidance";

/// Name of the sub-grammar for the constrained part after unconstrained text.
const REST: &str = "rest";

/// Constraint in the form read by llguidance.
pub(super) struct LlguidanceGrammar {
    pub(super) grammar: TopLevelGrammar,
    /// Length in bytes of the text read by llguidance.
    pub(super) text_bytes: usize,
    /// Whether llguidance reads the text of the client unchanged, so that positions in its errors are
    /// positions in this text.
    pub(super) shows_positions: bool,
}

impl LlguidanceGrammar {
    /// Converts a constraint.
    ///
    /// Errors: the constraint exceeds a limit, or contains a schema that cannot be enforced.
    pub(super) fn of(constraint: &OutputConstraint) -> Result<Self, GrammarError> {
        let text_bytes = check(constraint)?;
        let mut shows_positions = false;
        let (mut constrained, text_bytes) = match &constraint.spec {
            GrammarSpec::Json { schema, whitespace } => {
                let schema = prepared_schema(schema)?;
                let bytes = text_bytes.max(schema.to_string().len());
                let schema = with_whitespace(schema, whitespace)?;
                (GrammarWithLexer::from_json_schema(schema), bytes)
            }
            GrammarSpec::Regex(regex) => (GrammarWithLexer::from_regex(regex), text_bytes),
            GrammarSpec::Choice(texts) => {
                (GrammarWithLexer::from_lark(choice_grammar(texts)), text_bytes)
            }
            GrammarSpec::Lark(text) => {
                let prepared = embedded_schemas::prepared(text)?;
                let bytes = prepared.len();
                shows_positions = constraint.is_client_text && prepared == *text;
                (GrammarWithLexer::from_lark(prepared), bytes)
            }
        };
        let Some(head) = &constraint.start_after else {
            let grammar = TopLevelGrammar::from_grammar(constrained);
            return Ok(Self { grammar, text_bytes, shows_positions });
        };
        constrained.name = Some(REST.to_owned());
        let grammars = vec![GrammarWithLexer::from_lark(head.grammar_before(REST)), constrained];
        let grammar = TopLevelGrammar { grammars, max_tokens: None };
        Ok(Self { grammar, text_bytes, shows_positions })
    }
}

/// Returns a schema that llguidance enforces exactly. Some numbers cannot be represented exactly; there, the
/// returned schema is narrower than the original one.
///
/// Errors: a keyword cannot be enforced, or has unbounded cost.
pub(super) fn prepared_schema(schema: &Value) -> Result<Value, GrammarError> {
    let mut prepared = schema::normalise(schema)?;
    schema_cost::check(&prepared)?;
    number_keywords::prepare(&mut prepared)?;
    Ok(prepared)
}

/// Checks the length and the nesting depth of a constraint. Returns the length of its text in bytes.
pub(super) fn check(constraint: &OutputConstraint) -> Result<usize, GrammarError> {
    match &constraint.spec {
        GrammarSpec::Json { schema, whitespace } => {
            let pattern_bytes = match whitespace {
                JsonWhitespace::Pattern(regex) => check_bounds(regex.len(), bracket_depth(regex)),
                JsonWhitespace::Any | JsonWhitespace::None => Ok(0),
            };
            let pattern_bytes =
                pattern_bytes.map_err(|e| GrammarError::InvalidSpaces(e.to_string()))?;
            check_bounds(schema.to_string().len() + pattern_bytes, json_depth(schema))
        }
        GrammarSpec::Regex(text) | GrammarSpec::Lark(text) => {
            check_bounds(text.len(), bracket_depth(text))
        }
        GrammarSpec::Choice(texts) => check_bounds(texts.iter().map(String::len).sum(), 0),
    }
}

fn check_bounds(bytes: usize, depth: usize) -> Result<usize, GrammarError> {
    match (bytes, depth) {
        (bytes, _) if bytes > TEXT_BYTES_MAX => Err(GrammarError::TooLong { bytes }),
        (_, depth) if depth > NESTING_MAX => Err(GrammarError::TooDeep { depth }),
        _ => Ok(bytes),
    }
}

/// Returns the maximum nesting depth of brackets. Brackets inside strings are counted too; the limit is high
/// enough to allow for this.
fn bracket_depth(text: &str) -> usize {
    let (mut depth, mut deepest) = (0_usize, 0);
    for byte in text.bytes() {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        deepest = deepest.max(depth);
    }
    deepest
}

/// Returns the nesting depth of a JSON value, including brackets inside strings.
fn json_depth(value: &Value) -> usize {
    match value {
        Value::Array(list) => 1 + list.iter().map(json_depth).max().unwrap_or(0),
        Value::Object(map) => 1 + map.values().map(json_depth).max().unwrap_or(0),
        Value::String(text) => bracket_depth(text),
        _ => 0,
    }
}

/// Builds the Lark grammar for a choice between texts. Up to `SEPARATE_CHOICES_MAX` texts become separate
/// lexemes, so that llguidance can force a long text without comparing it with the other texts. If there
/// are more texts, all of them become a single lexeme, because llguidance limits the number of concurrently
/// active lexemes.
fn choice_grammar(texts: &[String]) -> String {
    let quoted = texts.iter().map(|text| Value::from(text.as_str()).to_string());
    let alternatives = quoted.collect::<Vec<_>>().join(" | ");
    if texts.len() <= SEPARATE_CHOICES_MAX {
        format!("start: {alternatives}\n")
    } else {
        format!("start: CHOICE\nCHOICE: {alternatives}\n")
    }
}

/// Adds llguidance's whitespace option to a schema. Requests cannot set llguidance options themselves,
/// because one of these options accepts unknown keywords and thereby widens the grammar.
fn with_whitespace(schema: Value, whitespace: &JsonWhitespace) -> Result<Value, GrammarError> {
    let mut schema = match schema {
        Value::Bool(true) => json!({}),
        Value::Bool(false) => {
            return Err(GrammarError::Invalid("the schema accepts no value".to_owned()));
        }
        schema => schema,
    };
    match whitespace {
        JsonWhitespace::Any => {}
        JsonWhitespace::None => schema[ENGINE_OPTIONS] = json!({"whitespace_flexible": false}),
        JsonWhitespace::Pattern(regex) => {
            schema[ENGINE_OPTIONS] = json!({"whitespace_pattern": regex});
        }
    }
    Ok(schema)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_depth_includes_brackets_in_strings() {
        assert_eq!(bracket_depth("(a[b]{2})(c)"), 2);
        assert_eq!(json_depth(&json!({"a": [{"pattern": "((x))"}]})), 5);
    }
}
