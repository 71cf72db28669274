//! Converts the template variables of a request from JSON to values. Integers keep all their digits.

use super::dict::DictValue;
use super::error::JinjaResult;
use super::numbers::integer;
use super::value::JinjaValue;
use crate::large_integers::integer_of_object;
use serde_json::Value;

/// Converts a JSON value.
///
/// Errors: the value is nested too deeply.
pub(crate) fn value_of_json(json: &Value) -> JinjaResult<JinjaValue> {
    Ok(match json {
        Value::Null => JinjaValue::None,
        Value::Bool(value) => JinjaValue::Bool(*value),
        Value::Number(number) => value_of_number(number),
        Value::String(text) => JinjaValue::text(text.as_str()),
        Value::Array(items) => {
            let items: JinjaResult<Vec<JinjaValue>> = items.iter().map(value_of_json).collect();
            JinjaValue::list(items?)?
        }
        Value::Object(members) => {
            if let Some(large) = integer_of_object(members).and_then(|digits| digits.parse().ok()) {
                return Ok(integer(large));
            }
            let mut dict = DictValue::default();
            for (key, member) in members {
                dict.insert(JinjaValue::text(key.as_str()), value_of_json(member)?)?;
            }
            JinjaValue::dict(dict)
        }
    })
}

fn value_of_number(number: &serde_json::Number) -> JinjaValue {
    if let Some(small) = number.as_i64() {
        return JinjaValue::Int(small);
    }
    match number.as_u64() {
        Some(large) => integer(large.into()),
        None => JinjaValue::Float(number.as_f64().unwrap_or(f64::NAN)),
    }
}
