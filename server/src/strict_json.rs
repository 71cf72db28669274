//! Strict JSON parser: converts a request body to values, whose types are then checked field by field.
//!
//! The parser is stricter than `serde_json::Value`: a duplicate key is an error, a syntax error names its
//! field, and the number of values is limited. A list of integers (a prompt of token ids) takes 8 bytes per
//! element. The nesting depth is limited to 128. Integers of any size keep all their digits, because chat
//! templates print them.

use super::api_error::ApiError;
use serde::de::{self, DeserializeSeed, MapAccess, SeqAccess, Visitor};
use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::fmt;
use text::{integer_of_member, mark_large_integers, template_integer};

/// Maximum number of values in one body; elements of integer lists are not counted.
const VALUES_MAX: u32 = 262_144;
/// Maximum number of bytes of the field path in an error message; longer paths are cut.
const PATH_BYTES_MAX: usize = 256;
/// Maximum number of keys for which duplicates are found by linear search; larger objects use a hash set.
const KEYS_SCANNED: usize = 16;

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

/// Returns the message of a `serde_json` error if it is a known message, else only the position of the error,
/// because other messages may contain internal details.
fn client_message(error: &serde_json::Error) -> String {
    const TEXT_BYTES_MAX: usize = 128;
    const KNOWN_PREFIXES: [&str; 12] = [
        "EOF while parsing",
        "control character",
        "duplicate key",
        "expected ",
        "invalid ",
        "key must be ",
        "lone ",
        "more than ",
        "number out of range",
        "recursion limit",
        "trailing ",
        "unexpected end of hex escape",
    ];
    let text = error.to_string();
    if text.len() <= TEXT_BYTES_MAX && KNOWN_PREFIXES.iter().any(|prefix| text.starts_with(prefix))
    {
        return text;
    }
    tracing::debug!(%error, "parser message hidden from the client");
    format!("line {} column {}", error.line(), error.column())
}

/// Whether the error is a number too large for a double. Such a number is valid if it is an integer.
fn is_out_of_range(error: &serde_json::Error) -> bool {
    error.to_string().starts_with("number out of range")
}

/// State shared by all nesting levels while one body is parsed.
struct JsonParseContext {
    /// Path of the value that failed to parse. While the error propagates, each nesting level prepends its
    /// part of the path.
    path: RefCell<String>,
    values_left: Cell<u32>,
    /// Whether a number in the body that may be a large integer was parsed as a float and thus may have
    /// lost digits.
    lost_digits: Cell<bool>,
}

impl Default for JsonParseContext {
    fn default() -> Self {
        Self {
            path: RefCell::default(),
            values_left: Cell::new(VALUES_MAX),
            lost_digits: Cell::new(false),
        }
    }
}

impl JsonParseContext {
    fn parse(&self, body: &[u8]) -> serde_json::Result<JsonValue> {
        let mut parser = serde_json::Deserializer::from_slice(body);
        let value = JsonValueSeed(self).deserialize(&mut parser)?;
        parser.end().map(|()| value)
    }

    fn prepend_key(&self, key: &str) {
        // A malicious client may send a key of several megabytes; the first characters are enough to identify
        // the key.
        self.prepend(key.chars().take(64).collect());
    }

    fn prepend_index(&self, index: usize) {
        self.prepend(format!("[{index}]"));
    }

    fn prepend(&self, part: String) {
        let mut path = self.path.borrow_mut();
        let dot = if path.is_empty() || path.starts_with('[') { "" } else { "." };
        let full = part + dot + &path;
        *path = match full.char_indices().find(|(at, _)| *at >= PATH_BYTES_MAX) {
            Some((end, _)) => format!("{}...", &full[..end]),
            None => full,
        };
    }

    fn count<E: de::Error>(&self) -> Result<(), E> {
        let left = self.values_left.get();
        self.values_left.set(
            left.checked_sub(1)
                .ok_or_else(|| E::custom(format_args!("more than {VALUES_MAX} values")))?,
        );
        Ok(())
    }
}

#[derive(Clone, Copy)]
struct JsonValueSeed<'a>(&'a JsonParseContext);

impl<'de> DeserializeSeed<'de> for JsonValueSeed<'_> {
    type Value = JsonValue;

    fn deserialize<D: de::Deserializer<'de>>(self, deserializer: D) -> Result<JsonValue, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for JsonValueSeed<'_> {
    type Value = JsonValue;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<JsonValue, E> {
        Ok(JsonValue::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<JsonValue, E> {
        Ok(JsonValue::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<JsonValue, E> {
        Ok(JsonValue::Int(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<JsonValue, E> {
        Ok(i64::try_from(value)
            .map_or_else(|_| JsonValue::LargeInt(value.to_string()), JsonValue::Int))
    }

    fn visit_f64<E>(self, value: f64) -> Result<JsonValue, E> {
        const INTEGER_END: f64 = 9_223_372_036_854_775_808.0; // 2^63
        let is_minus_zero = value == 0.0 && value.is_sign_negative();
        if is_minus_zero || value.abs() >= INTEGER_END {
            self.0.lost_digits.set(true);
        }
        Ok(JsonValue::Float(value))
    }

    fn visit_str<E>(self, value: &str) -> Result<JsonValue, E> {
        Ok(JsonValue::Str(value.to_owned()))
    }

    fn visit_string<E>(self, value: String) -> Result<JsonValue, E> {
        Ok(JsonValue::Str(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<JsonValue, A::Error> {
        let mut ints: Vec<i64> = Vec::new();
        let mut list: Vec<JsonValue> = Vec::new();
        loop {
            let index = ints.len().max(list.len());
            let next = seq.next_element_seed(self).inspect_err(|_| self.0.prepend_index(index))?;
            match next {
                None if list.is_empty() && !ints.is_empty() => return Ok(JsonValue::Ints(ints)),
                None => return Ok(JsonValue::List(list)),
                Some(JsonValue::Int(value)) if list.is_empty() => ints.push(value),
                Some(value) => {
                    self.0.count()?;
                    if list.is_empty() {
                        list.reserve(ints.len() + 1);
                        for int in ints.drain(..) {
                            self.0.count()?;
                            list.push(JsonValue::Int(int));
                        }
                    }
                    list.push(value);
                }
            }
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<JsonValue, A::Error> {
        let mut pairs: Vec<(String, JsonValue)> = Vec::new();
        let mut seen: HashSet<String> = HashSet::new();
        while let Some(key) = map.next_key::<String>()? {
            self.0.count()?;
            if pairs.len() == KEYS_SCANNED {
                seen.extend(pairs.iter().map(|(key, _)| key.clone()));
            }
            let is_duplicate = if pairs.len() < KEYS_SCANNED {
                pairs.iter().any(|(other, _)| *other == key)
            } else {
                !seen.insert(key.clone())
            };
            if is_duplicate {
                self.0.prepend_key(&key);
                return Err(de::Error::custom("duplicate key"));
            }
            let value = map.next_value_seed(self).inspect_err(|_| self.0.prepend_key(&key))?;
            pairs.push((key, value));
        }
        if let [(key, JsonValue::Str(value))] = &pairs[..]
            && let Some(digits) = integer_of_member(key, value)
        {
            return Ok(JsonValue::LargeInt(digits.to_owned()));
        }
        Ok(JsonValue::Object(pairs))
    }
}

#[cfg(test)]
mod tests;
