//! Strict JSON parser: converts a request body to values, whose types are then checked field by field.
//!
//! The parser is stricter than `serde_json::Value`: a duplicate key is an error, a syntax error names its
//! field, and the number of values is limited. A list of integers (a prompt of token ids) takes 8 bytes per
//! element. The nesting depth is limited to 128. Integers of any size keep all their digits, because chat
//! templates print them.

mod visitor;

use super::api_error::ApiError;
use text::{mark_large_integers, template_integer};
use visitor::JsonParseContext;

/// Value produced by the strict parser.
#[derive(Debug, Clone, PartialEq)]
pub enum JsonValue {
    /// `null`
    Null,
    /// `true`, `false`
    Bool(bool),
    /// Number without fraction or exponent that fits in an `i64`.
    Int(i64),
    /// Number without fraction or exponent that does not fit in an `i64`: its sign and digits.
    LargeInt(String),
    /// Any other number; always finite.
    Float(f64),
    /// String.
    Str(String),
    /// Non-empty list that contains only integers that fit in an `i64`.
    Ints(Vec<i64>),
    /// Any other list.
    List(Vec<JsonValue>),
    /// Object with unique keys, in the order of the request.
    Object(Vec<(String, JsonValue)>),
}

impl JsonValue {
    /// Parses a request body.
    ///
    /// Errors: HTTP status 400; the error names the field at the syntax error.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let context = JsonParseContext::default();
        let value = context.parse(body);
        if context.lost_digits.get() || value.as_ref().is_err_and(is_out_of_range) {
            let exact = str::from_utf8(body).ok().and_then(|body| {
                JsonParseContext::default().parse(mark_large_integers(body).as_bytes()).ok()
            });
            if let Some(exact) = exact {
                return Ok(exact);
            }
        }
        value.map_err(|error| {
            let message = format!("the body is not valid JSON: {}", client_message(&error));
            ApiError::invalid(context.path.take(), message)
        })
    }

    /// Returns the name of the value's type, for error messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Bool(_) => "a boolean",
            Self::Int(_) => "an integer",
            Self::LargeInt(_) => "an integer of more than 64 bits",
            Self::Float(_) => "a number",
            Self::Str(_) => "a string",
            Self::Ints(_) | Self::List(_) => "a list",
            Self::Object(_) => "an object",
        }
    }

    /// Whether the value is `null`.
    pub fn is_null(&self) -> bool {
        matches!(self, Self::Null)
    }

    /// Whether the value is a number.
    pub fn is_number(&self) -> bool {
        matches!(self, Self::Int(_) | Self::LargeInt(_) | Self::Float(_))
    }

    /// Returns the nearest double to a number, which is always finite; `None` for other values.
    pub fn as_f64(&self) -> Option<f64> {
        match self {
            Self::Int(number) => Some(*number as f64),
            Self::LargeInt(digits) => {
                let number: f64 = digits.parse().unwrap_or_default();
                Some(number.clamp(f64::MIN, f64::MAX))
            }
            Self::Float(number) => Some(*number),
            _ => None,
        }
    }

    /// Converts the value to a `serde_json` value, in which integers of more than 64 bits become floats.
    pub fn into_value(self) -> serde_json::Value {
        self.convert(&|digits| match digits.parse::<u64>() {
            Ok(number) => number.into(),
            Err(_) => Self::LargeInt(digits).as_f64().into(),
        })
    }

    /// Converts the value to a value for chat templates, in which integers keep all their digits.
    pub fn into_template_value(self) -> serde_json::Value {
        self.convert(&|digits| template_integer(&digits))
    }

    fn convert(self, large_int: &dyn Fn(String) -> serde_json::Value) -> serde_json::Value {
        use serde_json::Value;
        match self {
            Self::Null => Value::Null,
            Self::Bool(b) => Value::Bool(b),
            Self::Int(i) => Value::from(i),
            Self::LargeInt(digits) => large_int(digits),
            Self::Float(f) => Value::from(f),
            Self::Str(s) => Value::String(s),
            Self::Ints(list) => list.into_iter().map(Value::from).collect(),
            Self::List(list) => list.into_iter().map(|item| item.convert(large_int)).collect(),
            Self::Object(pairs) => {
                pairs.into_iter().map(|(key, value)| (key, value.convert(large_int))).collect()
            }
        }
    }
}

/// Text with which errors of the parser (`serde_json`) begin, and the message that clients get instead.
struct SyntaxError {
    prefix: &'static str,
    message: &'static str,
}

const fn syntax_error(prefix: &'static str, message: &'static str) -> SyntaxError {
    SyntaxError { prefix, message }
}

const SYNTAX_ERRORS: [SyntaxError; 17] = [
    syntax_error("EOF while parsing", "the text ends too early"),
    syntax_error("control character", "a character below U+0020 is not escaped"),
    syntax_error("expected value", "a value is missing"),
    syntax_error("expected `:`", "a colon is missing"),
    syntax_error("expected `,` or `]`", "a comma or a bracket is missing"),
    syntax_error("expected `,` or `}`", "a comma or a brace is missing"),
    syntax_error("expected ident", "a word is neither true nor false nor null"),
    syntax_error("expected ", "a character is missing"),
    syntax_error("invalid escape", "a string has an unknown escape sequence"),
    syntax_error("invalid number", "a number is malformed"),
    syntax_error("invalid unicode", "a string is not valid Unicode"),
    syntax_error("key must be ", "a key has no quotation marks"),
    syntax_error("lone ", "a string has half of a surrogate pair"),
    syntax_error("number out of range", "a number is too large"),
    syntax_error("recursion limit", "the values are nested too deeply"),
    syntax_error("trailing ", "more text follows than is allowed"),
    syntax_error("unexpected end of hex escape", "a string has an incomplete escape sequence"),
];

/// Messages that [`visitor`] creates, which clients get unchanged.
const OWN_MESSAGES: [&str; 2] = ["duplicate key", "more than "];

/// Returns the message for clients of a `serde_json` error: a fixed sentence of [`SYNTAX_ERRORS`] with the
/// position, or the position alone, because other texts of the library may contain internal details.
fn client_message(error: &serde_json::Error) -> String {
    const OWN_BYTES_MAX: usize = 128;
    let text = error.to_string();
    let is_own = OWN_MESSAGES.iter().any(|prefix| text.starts_with(prefix));
    if is_own && text.len() <= OWN_BYTES_MAX {
        return text;
    }
    let place = format!("line {} column {}", error.line(), error.column());
    if let Some(known) = SYNTAX_ERRORS.iter().find(|known| text.starts_with(known.prefix)) {
        return format!("{} at {place}", known.message);
    }
    tracing::debug!(%error, "parser message hidden from the client");
    place
}

/// Whether the error is a number too large for a double. Such a number is valid if it is an integer.
fn is_out_of_range(error: &serde_json::Error) -> bool {
    error.to_string().starts_with("number out of range")
}

#[cfg(test)]
mod tests;
