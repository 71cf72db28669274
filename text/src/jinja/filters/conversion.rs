//! The filters `int`, `float`, `abs`, `round`, `filesizeformat`, `tojson` and `pprint`.

use super::super::arguments::{CallArguments, flag, integer_or, text_argument};
use super::super::error::{JinjaError, JinjaErrorKind, JinjaResult};
use super::super::evaluator::TemplateEvaluator;
use super::super::numbers::{PythonNumber, integer, integer_of_float, parse_float, parse_integer};
use super::super::value::JinjaValue;
use super::FilterFunction;
use num_bigint::BigInt;

/// Returns the filter `name`.
pub(super) fn find(name: &str) -> Option<FilterFunction> {
    Some(match name {
        "int" => int,
        "float" => float,
        "abs" => abs,
        "round" => round,
        "filesizeformat" => file_size,
        "tojson" => super::super::json::to_json,
        "pprint" => super::pretty::pretty_print,
        _ => return None,
    })
}

/// Whether the filter `int` returns its default value instead of failing with this conversion error.
fn is_conversion_error(error: &JinjaError) -> bool {
    matches!(error.kind(), JinjaErrorKind::Type | JinjaErrorKind::Value)
}

fn int(
    _: &mut TemplateEvaluator,
    value: &JinjaValue,
    arguments: CallArguments,
) -> JinjaResult<JinjaValue> {
    let [default, base] = arguments.bind("int", ["default", "base"], 0)?;
    let base = integer_or(base.as_ref(), 10)?;
    let converted = match value {
        JinjaValue::Str(text) | JinjaValue::Markup(text) => {
            parse_integer(text, u32::try_from(base).unwrap_or(1))
        }
        JinjaValue::Float(number) => integer_of_float(*number),
        JinjaValue::Undefined(cause) => return Err(cause.error()),
        _ => match PythonNumber::of(value) {
            Some(number) => Ok(integer(number.to_big())),
            None => Err(JinjaError::type_error("int() argument must be a string or a number")),
        },
    };
    match converted {
        Err(error) if is_conversion_error(&error) => {}
        converted => return converted,
    }
    let converted = float_of(value)?.and_then(|number| integer_of_float(number).ok());
    Ok(converted.or(default).unwrap_or(JinjaValue::Int(0)))
}

fn float(
    _: &mut TemplateEvaluator,
    value: &JinjaValue,
    arguments: CallArguments,
) -> JinjaResult<JinjaValue> {
    let [default] = arguments.bind("float", ["default"], 0)?;
    Ok(match float_of(value)? {
        Some(number) => JinjaValue::Float(number),
        None => default.unwrap_or(JinjaValue::Float(0.0)),
    })
}

/// Converts a value as Python's `float` does; `None` if the value cannot be converted.
fn float_of(value: &JinjaValue) -> JinjaResult<Option<f64>> {
    match value {
        JinjaValue::Str(text) | JinjaValue::Markup(text) => Ok(parse_float(text)),
        JinjaValue::Undefined(cause) => Err(cause.error()),
        _ => PythonNumber::of(value).map(|number| number.to_float()).transpose(),
    }
}

fn abs(
    _: &mut TemplateEvaluator,
    value: &JinjaValue,
    arguments: CallArguments,
) -> JinjaResult<JinjaValue> {
    arguments.expect_none("abs")?;
    match PythonNumber::of(value) {
        Some(PythonNumber::Float(number)) => Ok(JinjaValue::Float(number.abs())),
        Some(number) => {
            let number = number.to_big();
            Ok(integer(BigInt::from(number.magnitude().clone())))
        }
        None => {
            let kind = value.type_name();
            Err(JinjaError::type_error(format!("bad operand type for abs(): '{kind}'")))
        }
    }
}

fn round(
    _: &mut TemplateEvaluator,
    value: &JinjaValue,
    arguments: CallArguments,
) -> JinjaResult<JinjaValue> {
    let [precision, method] = arguments.bind("round", ["precision", "method"], 0)?;
    let precision = integer_or(precision.as_ref(), 0)?;
    let method = method.map_or(Ok("common".into()), |method| text_argument("round", &method))?;
    let Some(number) = PythonNumber::of(value) else {
        if let JinjaValue::Undefined(cause) = value {
            return Err(cause.error());
        }
        let kind = value.type_name();
        let message = format!("type {kind} doesn't define __round__ method");
        return Err(JinjaError::type_error(message));
    };
    match &*method {
        "common" => match number {
            PythonNumber::Float(number) => Ok(JinjaValue::Float(rounded(number, precision))),
            number => Ok(rounded_integer(&number.to_big(), precision)),
        },
        "ceil" => directed_rounding(number.to_float()?, precision, f64::ceil),
        "floor" => directed_rounding(number.to_float()?, precision, f64::floor),
        _ => Err(JinjaError::runtime("method must be common, ceil or floor")),
    }
}

/// Rounds `number` to `precision` decimal places with `to_whole`, which rounds to a whole number.
fn directed_rounding(
    number: f64,
    precision: i64,
    to_whole: impl Fn(f64) -> f64,
) -> JinjaResult<JinjaValue> {
    let factor = 10_f64.powi(precision.clamp(-400, 400) as i32);
    let whole = to_whole(number * factor);
    if !whole.is_finite() {
        let message = "cannot convert float infinity to integer";
        return Err(JinjaError::new(JinjaErrorKind::Overflow, message));
    }
    Ok(JinjaValue::Float(whole / factor))
}

fn rounded(number: f64, precision: i64) -> f64 {
    if !number.is_finite() || precision > 330 {
        return number;
    }
    if let Ok(digits) = usize::try_from(precision) {
        return format!("{number:.digits$}").parse().unwrap_or(number);
    }
    // A negative precision rounds digits before the decimal point. The number is rounded in exponential form;
    // `exponent` is the decimal exponent of its first digit.
    let text = format!("{number:e}");
    let exponent: i64 = text.split_once('e').and_then(|(_, e)| e.parse().ok()).unwrap_or(0);
    if let Ok(digits) = usize::try_from(exponent.saturating_add(precision)) {
        return format!("{number:.digits$e}").parse().unwrap_or(number);
    }
    let unit = 10_f64.powi((-precision).min(400) as i32);
    let is_above_half = unit.is_finite() && number.abs() > unit / 2.0;
    if is_above_half { unit.copysign(number) } else { 0.0_f64.copysign(number) }
}

/// Rounds an integer to a multiple of a power of ten, half to even.
fn rounded_integer(number: &BigInt, precision: i64) -> JinjaValue {
    if precision >= 0 {
        return integer(number.clone());
    }
    if precision < -5_000 {
        return JinjaValue::Int(0);
    }
    let unit = BigInt::from(10).pow(precision.unsigned_abs() as u32);
    let magnitude = BigInt::from(number.magnitude().clone());
    let quotient = &magnitude / &unit;
    let twice = (&magnitude % &unit) * 2;
    let is_odd = quotient.bit(0);
    let rounds_up = twice > unit || twice == unit && is_odd;
    let rounded = (quotient + BigInt::from(u8::from(rounds_up))) * unit;
    integer(if number.sign() == num_bigint::Sign::Minus { -rounded } else { rounded })
}

fn file_size(
    _: &mut TemplateEvaluator,
    value: &JinjaValue,
    arguments: CallArguments,
) -> JinjaResult<JinjaValue> {
    let [binary] = arguments.bind("filesizeformat", ["binary"], 0)?;
    let is_binary = flag(binary.as_ref(), false);
    let bytes = float_of(value)?
        .ok_or_else(|| JinjaError::value_error("could not convert the value to float"))?;
    let base: f64 = if is_binary { 1024.0 } else { 1000.0 };
    if bytes == 1.0 {
        return Ok(JinjaValue::text("1 Byte"));
    }
    if bytes < base {
        let whole = integer_of_float(bytes)?;
        let JinjaValue::Int(whole) = whole else {
            return Err(JinjaError::value_error("too large"));
        };
        return Ok(JinjaValue::text(format!("{whole} Bytes")));
    }
    let letters = ['k', 'M', 'G', 'T', 'P', 'E', 'Z', 'Y'];
    let mut unit = base;
    for (index, letter) in letters.into_iter().enumerate() {
        unit *= base;
        if bytes < unit || index + 1 == letters.len() {
            let number = base * bytes / unit;
            let prefix = match (is_binary, letter) {
                (true, 'k') => "Ki".to_owned(),
                (true, letter) => format!("{letter}i"),
                (false, letter) => letter.to_string(),
            };
            let text = super::super::number_format::format_float(number, 'f', 1, false);
            return Ok(JinjaValue::text(format!("{text} {prefix}B")));
        }
    }
    Ok(JinjaValue::text(""))
}
