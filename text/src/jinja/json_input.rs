//! Converts the variables of a request to values. An integer keeps all its digits if the JSON number has them.

use super::dict::DictValue;
use super::error::JinjaResult;
use super::numbers::integer;
use super::value::JinjaValue;
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
    let text = number.to_string();
    if text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'-')
        && let Ok(large) = text.parse()
    {
        return integer(large);
    }
    JinjaValue::Float(number.as_f64().or_else(|| text.parse().ok()).unwrap_or(f64::NAN))
}
