//! Visitor that builds strict JSON values, and the path of a value that cannot be parsed.

use super::JsonValue;
use serde::de::{self, DeserializeSeed, MapAccess, SeqAccess, Visitor};
use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::fmt;
use text::integer_of_member;

/// Maximum number of keys for which duplicates are found by linear search; larger objects use a hash set.
const KEYS_SCANNED: usize = 16;

/// Maximum number of bytes of the field path in an error message; longer paths are cut.
const PATH_BYTES_MAX: usize = 256;

/// Maximum number of values in one body; elements of integer lists are not counted.
pub(super) const VALUES_MAX: u32 = 262_144;

/// State shared by all nesting levels while one body is parsed.
pub(super) struct JsonParseContext {
    /// Path of the value that failed to parse. While the error propagates, each nesting level prepends its
    /// part of the path.
    pub(super) path: RefCell<String>,
    pub(super) values_left: Cell<u32>,
    /// Whether a number in the body that may be a large integer was parsed as a float and thus may have
    /// lost digits.
    pub(super) lost_digits: Cell<bool>,
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
    pub(super) fn parse(&self, body: &[u8]) -> serde_json::Result<JsonValue> {
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
