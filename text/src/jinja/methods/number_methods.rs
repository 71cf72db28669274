//! Methods of integers and floats.

use super::super::error::JinjaResult;
use super::super::evaluator::TemplateEvaluator;
use super::super::numbers::PythonNumber;
use super::super::value::JinjaValue;
use super::MethodFunction;

/// Returns the method `name` of an integer.
pub(super) fn find_integer(name: &str) -> Option<MethodFunction> {
    Some(match name {
        "bit_length" => |_, value, arguments| {
            arguments.expect_none("bit_length")?;
            Ok(JinjaValue::Int(big(value).bits() as i64))
        },
        "bit_count" => |_, value, arguments| {
            arguments.expect_none("bit_count")?;
            let digits = big(value).magnitude().to_u64_digits();
            Ok(JinjaValue::Int(digits.iter().map(|digit| i64::from(digit.count_ones())).sum()))
        },
        "conjugate" => |_, value, arguments| {
            arguments.expect_none("conjugate")?;
            Ok(super::super::numbers::integer(big(value)))
        },
        _ => return None,
    })
}

fn big(value: &JinjaValue) -> num_bigint::BigInt {
    PythonNumber::of(value).map_or_else(num_bigint::BigInt::default, |number| number.to_big())
}

/// Returns the method `name` of a float.
pub(super) fn find_float(name: &str) -> Option<MethodFunction> {
    Some(match name {
        "is_integer" => is_integer,
        "conjugate" => |_, value, arguments| {
            arguments.expect_none("conjugate")?;
            Ok(value.clone())
        },
        _ => return None,
    })
}

fn is_integer(
    _: &mut TemplateEvaluator,
    value: &JinjaValue,
    arguments: super::super::arguments::CallArguments,
) -> JinjaResult<JinjaValue> {
    arguments.expect_none("is_integer")?;
    let JinjaValue::Float(number) = value else { return Ok(JinjaValue::Bool(true)) };
    Ok(JinjaValue::Bool(number.is_finite() && number.fract() == 0.0))
}
