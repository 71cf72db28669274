//! Arithmetic operators with Python's rules for numbers, strings and sequences.

use super::ast::BinaryOperator;
use super::error::{JinjaError, JinjaErrorKind, JinjaResult};
use super::evaluator::TemplateEvaluator;
use super::markup::escape_value;
use super::numbers::{PythonNumber, integer};
use super::percent_format::percent_format;
use super::value::{JinjaSequence, JinjaValue};
use num_bigint::{BigInt, Sign};
use std::rc::Rc;

/// Maximum size of an integer in bits. It exceeds 14,285 bits (4,300 digits), the size of the largest
/// integers that Python converts to text.
const BITS_MAX: u64 = 1 << 17;

/// Applies an arithmetic operator.
///
/// Errors: the operator does not apply to the values, or a limit is exceeded.
pub(crate) fn binary(
    evaluator: &mut TemplateEvaluator,
    operator: BinaryOperator,
    left: &JinjaValue,
    right: &JinjaValue,
) -> JinjaResult<JinjaValue> {
    if let (JinjaValue::Int(a), JinjaValue::Int(b)) = (left, right) {
        let small = match operator {
            BinaryOperator::Add => a.checked_add(*b),
            BinaryOperator::Subtract => a.checked_sub(*b),
            BinaryOperator::Multiply => a.checked_mul(*b),
            _ => None,
        };
        if let Some(number) = small {
            return Ok(JinjaValue::Int(number));
        }
    }
    if let Some(text) = left.as_text()
        && operator == BinaryOperator::Modulo
    {
        let text = text.clone();
        return percent_format(evaluator, &text, matches!(left, JinjaValue::Markup(_)), right);
    }
    for value in [left, right] {
        if let JinjaValue::Undefined(cause) = value {
            return Err(cause.error());
        }
    }
    if let (Some(a), Some(b)) = (PythonNumber::of(left), PythonNumber::of(right)) {
        return arithmetic(evaluator, operator, &a, &b);
    }
    let sequence = match operator {
        BinaryOperator::Add => concatenated(evaluator, left, right)?,
        BinaryOperator::Multiply => repeated(evaluator, left, right)?,
        _ => None,
    };
    sequence.ok_or_else(|| {
        let [a, b] = [left.type_name(), right.type_name()];
        let symbol = symbol(operator);
        JinjaError::type_error(format!("unsupported operand type(s) for {symbol}: '{a}' and '{b}'"))
    })
}

fn symbol(operator: BinaryOperator) -> &'static str {
    match operator {
        BinaryOperator::Add => "+",
        BinaryOperator::Subtract => "-",
        BinaryOperator::Multiply => "*",
        BinaryOperator::Divide => "/",
        BinaryOperator::FloorDivide => "//",
        BinaryOperator::Modulo => "%",
        BinaryOperator::Power => "** or pow()",
    }
}

fn concatenated(
    evaluator: &mut TemplateEvaluator,
    left: &JinjaValue,
    right: &JinjaValue,
) -> JinjaResult<Option<JinjaValue>> {
    let joined = match (left, right) {
        (JinjaValue::Str(a), JinjaValue::Str(b)) => {
            evaluator.charge(a.len() + b.len())?;
            JinjaValue::text([&**a, &**b].concat())
        }
        (JinjaValue::Markup(_), JinjaValue::Str(_) | JinjaValue::Markup(_))
        | (JinjaValue::Str(_), JinjaValue::Markup(_)) => {
            let text =
                [&*escape_value(evaluator, left)?, &*escape_value(evaluator, right)?].concat();
            evaluator.charge(text.len())?;
            JinjaValue::Markup(text.into())
        }
        (JinjaValue::List(a), JinjaValue::List(b)) => JinjaValue::list(chained(evaluator, a, b)?)?,
        (JinjaValue::Tuple(a), JinjaValue::Tuple(b)) => {
            JinjaValue::tuple(chained(evaluator, a, b)?)?
        }
        _ => return Ok(None),
    };
    Ok(Some(joined))
}

fn chained(
    evaluator: &mut TemplateEvaluator,
    left: &Rc<JinjaSequence>,
    right: &Rc<JinjaSequence>,
) -> JinjaResult<Vec<JinjaValue>> {
    evaluator.charge((left.items.len() + right.items.len()) * size_of::<JinjaValue>())?;
    Ok([&*left.items, &*right.items].concat())
}

fn repeated(
    evaluator: &mut TemplateEvaluator,
    left: &JinjaValue,
    right: &JinjaValue,
) -> JinjaResult<Option<JinjaValue>> {
    let (sequence, count) = match (PythonNumber::of(left), PythonNumber::of(right)) {
        (Some(PythonNumber::Int(count)), None) => (right, count),
        (None, Some(PythonNumber::Int(count))) => (left, count),
        _ => return Ok(None),
    };
    let count = usize::try_from(count).unwrap_or(0);
    Ok(Some(match sequence {
        JinjaValue::Str(text) | JinjaValue::Markup(text) => {
            evaluator.charge(text.len().saturating_mul(count))?;
            JinjaValue::text_like(sequence, text.repeat(count))
        }
        JinjaValue::List(items) => JinjaValue::list(repeated_items(evaluator, items, count)?)?,
        JinjaValue::Tuple(items) => JinjaValue::tuple(repeated_items(evaluator, items, count)?)?,
        _ => return Ok(None),
    }))
}

fn repeated_items(
    evaluator: &mut TemplateEvaluator,
    items: &Rc<JinjaSequence>,
    count: usize,
) -> JinjaResult<Vec<JinjaValue>> {
    let total = items.items.len().saturating_mul(count);
    evaluator.charge(total.saturating_mul(size_of::<JinjaValue>()))?;
    let mut repeated = Vec::with_capacity(total);
    for _ in 0..count.min(total) {
        repeated.extend_from_slice(&items.items);
    }
    Ok(repeated)
}

fn arithmetic(
    evaluator: &mut TemplateEvaluator,
    operator: BinaryOperator,
    left: &PythonNumber,
    right: &PythonNumber,
) -> JinjaResult<JinjaValue> {
    let is_float =
        matches!(left, PythonNumber::Float(_)) || matches!(right, PythonNumber::Float(_));
    if is_float || operator == BinaryOperator::Divide {
        return float_arithmetic(operator, left.to_float()?, right.to_float()?);
    }
    if operator == BinaryOperator::Power {
        return power(evaluator, left, right);
    }
    let (a, b) = (left.to_big(), right.to_big());
    // The instruction cost is proportional to the product of the operands' sizes, because the time of a
    // multiplication or division is.
    evaluator.spend((a.bits() / 64 + 1) * (b.bits() / 64 + 1) / 64)?;
    let result = match operator {
        BinaryOperator::Add => a + b,
        BinaryOperator::Subtract => a - b,
        BinaryOperator::Multiply => a * b,
        _ if b.sign() == Sign::NoSign => {
            return Err(zero_division("integer division or modulo by zero"));
        }
        _ => {
            let (mut quotient, mut remainder) = (&a / &b, &a % &b);
            if remainder.sign() != Sign::NoSign && remainder.sign() != b.sign() {
                quotient -= BigInt::from(1);
                remainder += b;
            }
            if operator == BinaryOperator::Modulo { remainder } else { quotient }
        }
    };
    if result.bits() > BITS_MAX {
        return Err(too_large());
    }
    Ok(integer(result))
}

fn too_large() -> JinjaError {
    JinjaError::new(JinjaErrorKind::Memory, format!("integer exceeds {BITS_MAX} bits"))
}

fn zero_division(message: &str) -> JinjaError {
    JinjaError::runtime(message)
}

fn power(
    evaluator: &mut TemplateEvaluator,
    base: &PythonNumber,
    exponent: &PythonNumber,
) -> JinjaResult<JinjaValue> {
    let base_big = base.to_big();
    let exponent_big = exponent.to_big();
    if exponent_big.sign() == Sign::Minus {
        if base_big.sign() == Sign::NoSign {
            return Err(zero_division("0.0 cannot be raised to a negative power"));
        }
        return float_arithmetic(BinaryOperator::Power, base.to_float()?, exponent.to_float()?);
    }
    let is_unit = base_big.bits() <= 1;
    let exponent = match u32::try_from(&exponent_big) {
        Ok(exponent) => exponent,
        // The base is 0, 1 or -1, so its power depends only on whether this exponent, which exceeds 32 bits,
        // is even or odd. The exponent 2 or 3 gives the same power.
        Err(_) if is_unit => 2 + u32::from(exponent_big.bit(0)),
        Err(_) => return Err(too_large()),
    };
    let bits = base_big.bits() * u64::from(exponent);
    if bits > BITS_MAX && !is_unit {
        return Err(too_large());
    }
    evaluator.spend((bits.min(BITS_MAX) / 64).pow(2) / 64)?;
    let exponent = if is_unit { exponent.min(2 + exponent % 2) } else { exponent };
    Ok(integer(base_big.pow(exponent)))
}

fn float_arithmetic(operator: BinaryOperator, a: f64, b: f64) -> JinjaResult<JinjaValue> {
    let result = match operator {
        BinaryOperator::Add => a + b,
        BinaryOperator::Subtract => a - b,
        BinaryOperator::Multiply => a * b,
        BinaryOperator::Power => return float_power(a, b),
        _ if b == 0.0 => return Err(zero_division("float division by zero")),
        BinaryOperator::Divide => a / b,
        BinaryOperator::Modulo => float_remainder(a, b),
        BinaryOperator::FloorDivide => floor_quotient(a, b),
    };
    Ok(JinjaValue::Float(result))
}

fn float_remainder(a: f64, b: f64) -> f64 {
    let remainder = a % b;
    if remainder == 0.0 {
        return 0.0_f64.copysign(b);
    }
    if (remainder < 0.0) == (b < 0.0) { remainder } else { remainder + b }
}

fn floor_quotient(a: f64, b: f64) -> f64 {
    let quotient = (a - float_remainder(a, b)) / b;
    if quotient == 0.0 {
        return 0.0_f64.copysign(a / b);
    }
    let floor = quotient.floor();
    if quotient - floor > 0.5 { floor + 1.0 } else { floor }
}

fn float_power(a: f64, b: f64) -> JinjaResult<JinjaValue> {
    if a == 0.0 && b < 0.0 {
        return Err(zero_division("0.0 cannot be raised to a negative power"));
    }
    if a < 0.0 && a.is_finite() && b.is_finite() && b.fract() != 0.0 {
        return Err(JinjaError::unsupported("complex numbers are unsupported"));
    }
    let result = a.powf(b);
    if result.is_infinite() && a.is_finite() && b.is_finite() {
        return Err(JinjaError::new(JinjaErrorKind::Overflow, "Numerical result out of range"));
    }
    Ok(JinjaValue::Float(result))
}

/// Applies unary minus if `is_negative`, else unary plus.
///
/// Errors: the value is not a number.
pub(crate) fn signed(value: &JinjaValue, is_negative: bool) -> JinjaResult<JinjaValue> {
    if let JinjaValue::Undefined(cause) = value {
        return Err(cause.error());
    }
    let sign = if is_negative { "-" } else { "+" };
    match PythonNumber::of(value) {
        Some(PythonNumber::Float(number)) => {
            Ok(JinjaValue::Float(if is_negative { -number } else { number }))
        }
        Some(number) => {
            let number = number.to_big();
            Ok(integer(if is_negative { -number } else { number }))
        }
        None => {
            let message = format!("bad operand type for unary {sign}: '{}'", value.type_name());
            Err(JinjaError::type_error(message))
        }
    }
}
