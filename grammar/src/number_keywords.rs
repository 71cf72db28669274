//! Rewrites number keywords in JSON schemas so that they fit in llguidance's integers.
//!
//! llguidance reads `multipleOf` into 32 bits and integer bounds into 64 bits; its arithmetic overflows for
//! larger values. `prepare` computes the exact meaning of each keyword. If llguidance would read a keyword
//! incorrectly, the keyword is rewritten so that llguidance reads it correctly. If llguidance cannot enforce
//! a keyword, an error names the keyword. The prepared schema accepts no number that the original schema
//! rejects.

use super::compile::GrammarError;
use super::decimal_number::DecimalNumber;
use serde_json::{Map, Number, Value};

/// Maximum number of decimal places of a `multipleOf`: 9 × 10^places must fit in 32 bits.
const PLACES_MAX: u32 = 8;
/// Largest bound: the greatest double below 10^18, the limit up to which llguidance can count powers of ten.
const BOUND_MAX: i64 = 999_999_999_999_999_872;
/// Magnitude from which all doubles are integers, but not all integers are doubles.
const INEXACT_INTEGER_MIN: f64 = (1_u64 << 53) as f64;
/// Maximum number of decimal places of a bound. Each place is a nesting level in the regular expression that
/// llguidance builds from the bound.
const BOUND_PLACES_MAX: usize = 40;
/// Number of neighbouring doubles on each side that are searched for a double that llguidance reads as the
/// exact decimal.
const NEIGHBOURS_MAX: u64 = 16;
/// Keywords whose values are data, not schemas.
const DATA_KEYWORDS: [&str; 3] = ["default", "examples", "example"];
/// Keywords whose value is a count. llguidance ignores counts that are not written as integers.
const COUNT_KEYWORDS: [&str; 6] =
    ["minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"];
/// Largest count: llguidance interprets the next larger value, `u32::MAX`, as unlimited.
const COUNT_MAX: u64 = u32::MAX as u64 - 1;
/// Keywords whose members are schemas with user-defined names.
const NAMING_KEYWORDS: [&str; 5] =
    ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"];

/// Rewrites the number keywords of a schema so that llguidance enforces them exactly.
///
/// Errors: a keyword has a value that cannot be enforced or that JSON Schema does not allow.
pub(super) fn prepare(schema: &mut Value) -> Result<(), GrammarError> {
    visit_schema(schema)
}

fn visit_schema(schema: &mut Value) -> Result<(), GrammarError> {
    match schema {
        Value::Array(list) => list.iter_mut().try_for_each(visit_schema),
        Value::Object(members) => {
            check_combined(members)?;
            members.iter_mut().try_for_each(|(keyword, value)| visit_keyword(keyword, value))
        }
        _ => Ok(()),
    }
}

fn visit_keyword(keyword: &str, value: &mut Value) -> Result<(), GrammarError> {
    if DATA_KEYWORDS.contains(&keyword) {
        return Ok(());
    }
    if let (true, Value::Object(named)) = (NAMING_KEYWORDS.contains(&keyword), &mut *value) {
        return named.values_mut().try_for_each(visit_schema);
    }
    let Value::Number(number) = &*value else {
        return match keyword {
            "const" | "enum" => check_constants(keyword, value),
            _ => visit_schema(value),
        };
    };
    let adjusted = match keyword {
        "multipleOf" => Some(adjusted_multiple(number)?),
        "minimum" | "exclusiveMinimum" => Some(adjusted_bound(keyword, number, BoundSide::Low)?),
        "maximum" | "exclusiveMaximum" => Some(adjusted_bound(keyword, number, BoundSide::High)?),
        "const" => return check_constants(keyword, value),
        _ if COUNT_KEYWORDS.contains(&keyword) => Some(adjusted_count(keyword, number)?),
        _ => None,
    };
    if let Some(adjusted) = adjusted {
        *value = Value::Number(adjusted);
    }
    Ok(())
}

fn reject<T>(message: String) -> Result<T, GrammarError> {
    Err(GrammarError::Invalid(message))
}

/// Returns a `multipleOf` value that llguidance reads as the exact decimal in the schema. If the decimal has
/// more places than llguidance supports, the value is a multiple of it: for example, 10^-8 for 10^-9.
fn adjusted_multiple(number: &Number) -> Result<Number, GrammarError> {
    const KEYWORD: &str = "multipleOf";
    let double = number.as_f64().unwrap_or_default();
    if double <= 0.0 {
        return reject(format!("{KEYWORD} must be greater than 0, got {number}"));
    }
    let Some(decimal) = DecimalNumber::from_number(number) else {
        return reject(format!("{KEYWORD} {number} has too many digits"));
    };
    let (has_too_many_places, decimal) = (decimal.places > PLACES_MAX, decimal.coarser(PLACES_MAX));
    let double = if has_too_many_places { decimal.to_double() } else { double };
    if !decimal.fits_library() {
        return reject(format!("{KEYWORD} {number} has too many digits"));
    }
    let is_read_exactly =
        |double: &f64| DecimalNumber::as_read_by_library(*double) == Some(decimal);
    if is_read_exactly(&double) {
        let coarser = has_too_many_places.then(|| Number::from_f64(double)).flatten();
        return Ok(coarser.unwrap_or_else(|| number.clone()));
    }
    let bits = double.to_bits();
    let neighbours = (1..=NEIGHBOURS_MAX).flat_map(|step| [bits - step, bits + step]);
    let adjusted = neighbours.map(f64::from_bits).find(is_read_exactly).and_then(Number::from_f64);
    adjusted.map_or_else(|| reject(format!("{KEYWORD} {number} has too many digits")), Ok)
}

/// Rejects schemas that apply to the same number if their `multipleOf` values have no common multiple that
/// fits in llguidance's integers.
fn check_combined(members: &Map<String, Value>) -> Result<(), GrammarError> {
    combine(members, None).map(drop)
}

/// Returns the least common multiple of `accumulated`, the `multipleOf` value of the schema, and the
/// `multipleOf` values of all schemas in its `allOf`. For each schema in `anyOf` and `oneOf`, only checks
/// that its `multipleOf` has a common multiple with the returned value.
fn combine(
    members: &Map<String, Value>,
    accumulated: Option<DecimalNumber>,
) -> Result<Option<DecimalNumber>, GrammarError> {
    let own_multiple =
        members.get("multipleOf").and_then(Value::as_number).and_then(DecimalNumber::from_number);
    let own_multiple = own_multiple.map(|decimal| decimal.coarser(PLACES_MAX));
    let mut all = common_multiple(accumulated, own_multiple)?;
    let parts = |keyword: &str| {
        let list = members.get(keyword).and_then(Value::as_array).into_iter().flatten();
        list.filter_map(Value::as_object)
    };
    for part in parts("allOf") {
        all = combine(part, all)?;
    }
    if all.is_some() {
        for option in parts("anyOf").chain(parts("oneOf")) {
            combine(option, all)?;
        }
    }
    Ok(all)
}

/// Returns the least common multiple of two `multipleOf` values; `None` = a schema has no such value.
fn common_multiple(
    a: Option<DecimalNumber>,
    b: Option<DecimalNumber>,
) -> Result<Option<DecimalNumber>, GrammarError> {
    let (Some(first), Some(second)) = (a, b) else { return Ok(a.or(b)) };
    let Some(multiple) = first.common_multiple(second) else {
        return reject(
            "multipleOf values of schemas that apply together have a too large common multiple"
                .to_owned(),
        );
    };
    Ok(Some(multiple))
}

/// Converts a count to an integer; a count such as 2.0 is accepted. An upper limit above `COUNT_MAX` becomes
/// `COUNT_MAX`, because no output is that long.
fn adjusted_count(keyword: &str, number: &Number) -> Result<Number, GrammarError> {
    let double = number.as_f64().unwrap_or(-1.0);
    if double < 0.0 || double.fract() != 0.0 {
        return reject(format!("{keyword} must be a non-negative integer, got {number}"));
    }
    let count = number.as_u64().unwrap_or(double as u64); // Casts saturate.
    if count <= COUNT_MAX {
        return Ok(Number::from(count));
    }
    if keyword.starts_with("max") {
        return Ok(Number::from(COUNT_MAX));
    }
    reject(format!("{keyword} {number} exceeds the limit of {COUNT_MAX}"))
}

/// Side of a range: whether a bound is its lower or its upper limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BoundSide {
    Low,
    High,
}

/// Returns the bound unchanged if llguidance enforces it exactly, otherwise the nearest enforceable bound
/// inside the range.
fn adjusted_bound(keyword: &str, number: &Number, side: BoundSide) -> Result<Number, GrammarError> {
    let double = number.as_f64().unwrap_or_default();
    let bound_max = BOUND_MAX as f64;
    let adjusted = match side {
        BoundSide::Low if double < -bound_max => Some(-bound_max),
        BoundSide::High if double > bound_max => Some(bound_max),
        _ if double.abs() > bound_max => {
            return reject(format!("{keyword} {number} exceeds the limit of ±{BOUND_MAX}"));
        }
        _ => nearest_inner_double(keyword, number, double, side),
    };
    let places = format!("{double}").split_once('.').map_or(0, |(_, places)| places.len());
    if places > BOUND_PLACES_MAX {
        return reject(format!(
            "{keyword} {number} has {places} decimal places, the limit is {BOUND_PLACES_MAX}"
        ));
    }
    Ok(adjusted.and_then(Number::from_f64).unwrap_or_else(|| number.clone()))
}

/// Returns the nearest double inside the range, in two cases: the bound is an integer that is not a double,
/// or it is an exclusive bound of at least `INEXACT_INTEGER_MIN`, where llguidance's addition or subtraction
/// of 1 has no effect. `None` if the bound is enforced as it is.
fn nearest_inner_double(
    keyword: &str,
    number: &Number,
    double: f64,
    side: BoundSide,
) -> Option<f64> {
    let inwards = |double: f64| match side {
        BoundSide::Low => double.next_up(),
        BoundSide::High => double.next_down(),
    };
    let is_outside = integer(number).is_some_and(|exact| match side {
        BoundSide::Low => (double as i128) < exact,
        BoundSide::High => (double as i128) > exact,
    });
    let is_coarse = keyword.starts_with("exclusive") && double.abs() >= INEXACT_INTEGER_MIN;
    let adjusted = if is_outside { inwards(double) } else { double };
    let adjusted = if is_coarse { inwards(adjusted) } else { adjusted };
    (is_outside || is_coarse).then_some(adjusted)
}

fn integer(number: &Number) -> Option<i128> {
    number.as_i64().map(i128::from).or_else(|| number.as_u64().map(i128::from))
}

/// Rejects constants that llguidance would convert to a different number.
fn check_constants(keyword: &str, value: &Value) -> Result<(), GrammarError> {
    match value {
        Value::Array(list) => list.iter().try_for_each(|item| check_constants(keyword, item)),
        Value::Object(members) => {
            members.values().try_for_each(|item| check_constants(keyword, item))
        }
        Value::Number(number) => {
            let double = number.as_f64().unwrap_or(f64::INFINITY);
            let is_exact = integer(number).is_none_or(|exact| double as i128 == exact);
            if is_exact && double.abs() <= BOUND_MAX as f64 {
                return Ok(());
            }
            reject(format!("{keyword} {number} has too many digits"))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
