//! Converts the values of fields, and names the fields in errors.

use super::super::api_error::ApiError;
use super::super::strict_json::JsonValue;
use std::ops::RangeInclusive;

const IGNORED_NAME_BYTES: usize = 64;

/// Parses a list of integers; `path` is the field name in errors.
pub(crate) fn int_list(
    path: &str,
    value: JsonValue,
    range: RangeInclusive<i64>,
    len_max: usize,
) -> Result<Vec<i64>, ApiError> {
    let list = match value {
        JsonValue::Ints(list) => list,
        JsonValue::List(list) => {
            let int = |(index, item)| {
                as_int(item).ok_or_else(|| {
                    let message = format!("must be an integer, not {}", item.kind());
                    ApiError::invalid(format!("{path}[{index}]"), message)
                })
            };
            list.iter().enumerate().map(int).collect::<Result<_, _>>()?
        }
        other => return Err(wrong_type(path.to_owned(), "a list of integers", &other)),
    };
    check_len(path, list.len(), len_max)?;
    match list.iter().position(|id| !range.contains(id)) {
        None => Ok(list),
        Some(index) => {
            let (low, high) = (range.start(), range.end());
            let message = format!("must be from {low} to {high}, got {}", list[index]);
            Err(ApiError::invalid(format!("{path}[{index}]"), message))
        }
    }
}

/// Parses a list of strings of 1 to `bytes_max` bytes; `path` is the field name in errors.
pub(crate) fn string_list(
    path: &str,
    value: JsonValue,
    bytes_max: usize,
    len_max: usize,
) -> Result<Vec<String>, ApiError> {
    let list = match value {
        JsonValue::List(list) => list,
        JsonValue::Ints(list) => {
            check_len(path, list.len(), len_max)?;
            return Err(ApiError::invalid(
                format!("{path}[0]"),
                "must be a string, not an integer",
            ));
        }
        other => return Err(wrong_type(path.to_owned(), "a list of strings", &other)),
    };
    check_len(path, list.len(), len_max)?;
    let check = |(index, item)| match item {
        JsonValue::Str(s) if (1..=bytes_max).contains(&s.len()) => Ok(s),
        JsonValue::Str(s) => {
            let message = format!("must have 1 to {bytes_max} bytes, got {}", s.len());
            Err(ApiError::invalid(format!("{path}[{index}]"), message))
        }
        other => Err(wrong_type(format!("{path}[{index}]"), "a string", &other)),
    };
    list.into_iter().enumerate().map(check).collect()
}

/// Creates the 400 error: the value of the field `path` has the wrong type.
pub(crate) fn wrong_type(path: String, expected: &str, got: &JsonValue) -> ApiError {
    ApiError::invalid(path, format!("must be {expected}, not {}", got.kind()))
}

fn check_len(path: &str, len: usize, len_max: usize) -> Result<(), ApiError> {
    if len <= len_max {
        return Ok(());
    }
    Err(ApiError::invalid(path, format!("at most {len_max} entries, got {len}")))
}

pub(super) fn out_of_range(path: String, expected: &str, got: &JsonValue) -> ApiError {
    match got {
        JsonValue::Int(value) => {
            ApiError::invalid(path, format!("must be {expected}, got {value}"))
        }
        JsonValue::Float(value) => {
            ApiError::invalid(path, format!("must be {expected}, got {value}"))
        }
        JsonValue::LargeInt(_) => {
            ApiError::invalid(path, format!("must be {expected}, got {}", got.kind()))
        }
        other => wrong_type(path, expected, other),
    }
}

/// Returns a number without fractional part as an integer, because JSON Schema regards `5.0` as an integer.
pub(super) fn as_int(value: &JsonValue) -> Option<i64> {
    const END: f64 = 9_223_372_036_854_775_808.0; // 2^63
    match value {
        JsonValue::Int(value) => Some(*value),
        JsonValue::Float(value) if value.fract() == 0.0 && (-END..END).contains(value) => {
            Some(*value as i64)
        }
        _ => None,
    }
}

pub(super) fn as_float(value: &JsonValue) -> Option<f32> {
    value.as_f64().map(|number| number as f32).filter(|x| x.is_finite())
}

/// Replaces the characters of a field name that are not valid in a header, and shortens the name; the client
/// may send any name.
pub(crate) fn printable(name: &str) -> String {
    let safe = name.chars().map(|c| if c.is_ascii_graphic() && c != ',' { c } else { '?' });
    safe.take(IGNORED_NAME_BYTES).collect()
}
