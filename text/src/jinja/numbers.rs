//! Python's numbers: integers of any size and floats, their conversions, and their text.

use super::error::{JinjaError, JinjaErrorKind, JinjaResult};
use super::value::JinjaValue;
use num_bigint::{BigInt, Sign};
use std::cmp::Ordering;
use std::rc::Rc;

/// Maximum number of digits of an integer that Python converts to or from text.
const DIGITS_MAX: usize = 4_300;

/// Number; `true` and `false` count as 1 and 0.
#[derive(Debug, Clone)]
pub(crate) enum PythonNumber {
    /// Integer of 64 bits.
    Int(i64),
    /// Other integer.
    Big(Rc<BigInt>),
    /// Float.
    Float(f64),
}

impl PythonNumber {
    /// Returns a value as a number; `None` if the value is not a number.
    pub(crate) fn of(value: &JinjaValue) -> Option<Self> {
        Some(match value {
            JinjaValue::Bool(value) => Self::Int(i64::from(*value)),
            JinjaValue::Int(number) => Self::Int(*number),
            JinjaValue::Big(number) => Self::Big(Rc::clone(number)),
            JinjaValue::Float(number) => Self::Float(*number),
            _ => return None,
        })
    }

    /// Converts to a float.
    ///
    /// Errors: the integer is too large.
    pub(crate) fn to_float(&self) -> JinjaResult<f64> {
        match self {
            Self::Int(number) => Ok(*number as f64),
            Self::Float(number) => Ok(*number),
            Self::Big(number) => {
                let float = big_to_float(number);
                if float.is_finite() {
                    return Ok(float);
                }
                let message = "int too large to convert to float";
                Err(JinjaError::new(JinjaErrorKind::Overflow, message))
            }
        }
    }

    /// Compares two numbers; `None` if one of them is NaN.
    pub(crate) fn compare(&self, other: &Self) -> Option<Ordering> {
        match (self, other) {
            (Self::Int(a), Self::Int(b)) => Some(a.cmp(b)),
            (Self::Float(a), Self::Float(b)) => a.partial_cmp(b),
            (Self::Float(a), b) => compare_float(*a, b),
            (a, Self::Float(b)) => compare_float(*b, a).map(Ordering::reverse),
            (a, b) => Some(a.to_big().cmp(&b.to_big())),
        }
    }

    /// Returns the number as a large integer; a float is truncated.
    pub(crate) fn to_big(&self) -> BigInt {
        match self {
            Self::Int(number) => BigInt::from(*number),
            Self::Big(number) => (**number).clone(),
            Self::Float(number) => float_to_big(*number),
        }
    }
}

/// Truncates a float to an integer.
pub(crate) fn float_to_big(number: f64) -> BigInt {
    format!("{:.0}", number.trunc()).parse().unwrap_or_default()
}

fn big_to_float(number: &BigInt) -> f64 {
    if number.bits() > 1_100 {
        return if number.sign() == Sign::Minus { f64::NEG_INFINITY } else { f64::INFINITY };
    }
    number.to_string().parse().unwrap_or(f64::NAN)
}

fn compare_float(float: f64, integer: &PythonNumber) -> Option<Ordering> {
    if float.is_nan() {
        return None;
    }
    if float.is_infinite() {
        return Some(if float > 0.0 { Ordering::Greater } else { Ordering::Less });
    }
    let whole = float_to_big(float).cmp(&integer.to_big());
    let fraction = float.fract().partial_cmp(&0.0);
    Some(if whole == Ordering::Equal { fraction.unwrap_or(Ordering::Equal) } else { whole })
}

/// Creates an integer value.
pub(crate) fn integer(number: BigInt) -> JinjaValue {
    match i64::try_from(&number) {
        Ok(small) => JinjaValue::Int(small),
        Err(_) => JinjaValue::Big(Rc::new(number)),
    }
}

/// Truncates a float to an integer value, as Python's `int` does.
///
/// Errors: the float is infinite or NaN.
pub(crate) fn integer_of_float(number: f64) -> JinjaResult<JinjaValue> {
    if number.is_nan() {
        return Err(JinjaError::value_error("cannot convert float NaN to integer"));
    }
    if number.is_infinite() {
        let message = "cannot convert float infinity to integer";
        return Err(JinjaError::new(JinjaErrorKind::Overflow, message));
    }
    Ok(integer(float_to_big(number)))
}

/// Reads an integer as Python's `int(text, base)`: with surrounding white space, a sign, single underscores
/// between digits, and the prefix of the base.
pub(crate) fn parse_integer(text: &str, base: u32) -> JinjaResult<JinjaValue> {
    let invalid = || {
        let quoted = super::python_text::quote(text);
        JinjaError::value_error(format!("invalid literal for int() with base {base}: {quoted}"))
    };
    let trimmed = super::python_text::strip(text);
    let (is_negative, digits) = match trimmed.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, trimmed.strip_prefix('+').unwrap_or(trimmed)),
    };
    let prefix = digits.get(..2).unwrap_or_default().to_ascii_lowercase();
    let prefix_base = match prefix.as_str() {
        "0b" => 2,
        "0o" => 8,
        "0x" => 16,
        _ => 0,
    };
    let (base, digits) = match base {
        0 if prefix_base == 0 => {
            let has_leading_zero =
                digits.starts_with('0') && digits.bytes().any(|b| b != b'0' && b != b'_');
            if has_leading_zero {
                return Err(invalid());
            }
            (10, digits)
        }
        0 => (prefix_base, &digits[2..]),
        base if base == prefix_base => (base, &digits[2..]),
        base => (base, digits),
    };
    let digits =
        if prefix_base == base { digits.strip_prefix('_').unwrap_or(digits) } else { digits };
    let is_separated = !digits.starts_with('_') && !digits.ends_with('_') && !digits.contains("__");
    if !is_separated || digits.is_empty() || !(2..=36).contains(&base) {
        return Err(invalid());
    }
    let digits = digits.replace('_', "");
    if digits.len() > DIGITS_MAX && !base.is_power_of_two() {
        return Err(digits_error());
    }
    if !digits.chars().all(|c| c.is_digit(base)) {
        return Err(invalid());
    }
    let number = BigInt::parse_bytes(digits.as_bytes(), base).ok_or_else(invalid)?;
    Ok(integer(if is_negative { -number } else { number }))
}

/// Reads a float as Python's `float(text)`.
pub(crate) fn parse_float(text: &str) -> Option<f64> {
    let trimmed = super::python_text::strip(text);
    let unsigned = trimmed.strip_prefix(['+', '-']).unwrap_or(trimmed);
    let bytes = unsigned.as_bytes();
    let separated = (0..bytes.len()).all(|at| {
        bytes[at] != b'_'
            || at > 0
                && bytes[at - 1].is_ascii_digit()
                && bytes.get(at + 1).is_some_and(u8::is_ascii_digit)
    });
    if !separated {
        return None;
    }
    match unsigned.to_ascii_lowercase().as_str() {
        "nan" | "inf" | "infinity" => trimmed.parse().ok(),
        _ if unsigned.starts_with(|c: char| c.is_ascii_digit() || c == '.') => {
            trimmed.replace('_', "").parse().ok()
        }
        _ => None,
    }
}

fn digits_error() -> JinjaError {
    let message = format!("Exceeds the limit ({DIGITS_MAX} digits) for integer string conversion");
    JinjaError::value_error(message)
}

/// Writes a large integer in decimal.
///
/// Errors: the integer has more digits than Python converts to text.
pub(crate) fn big_text(number: &BigInt) -> JinjaResult<String> {
    // A decimal digit takes log2(10), about 3.32 bits, so an integer with more than 10/3 bits per digit has
    // more than `DIGITS_MAX` digits.
    if number.bits() > (DIGITS_MAX as u64) * 10 / 3 {
        return Err(digits_error());
    }
    let text = number.to_string();
    if text.trim_start_matches('-').len() > DIGITS_MAX {
        return Err(digits_error());
    }
    Ok(text)
}

/// Writes a float as Python's `repr` does: with the shortest digits that round-trip, in exponential notation
/// below 1e-4 and from 1e16.
pub(crate) fn float_text(number: f64) -> String {
    if number.is_nan() {
        return "nan".to_owned();
    }
    if number.is_infinite() {
        return if number > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    if number == 0.0 || (1e-4..1e16).contains(&number.abs()) {
        let text = number.to_string();
        return if text.contains('.') { text } else { text + ".0" };
    }
    with_python_exponent(&format!("{number:e}"))
}

/// Converts exponential notation from Rust's form (`1e5`) to Python's form (`1e+05`).
pub(crate) fn with_python_exponent(text: &str) -> String {
    let (mantissa, exponent) = text.split_once('e').unwrap_or((text, "0"));
    let (sign, digits) = exponent.strip_prefix('-').map_or(('+', exponent), |digits| ('-', digits));
    format!("{mantissa}e{sign}{digits:0>2}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_have_the_text_of_python() {
        let cases = [
            (1.0, "1.0"),
            (-0.0, "-0.0"),
            (0.1, "0.1"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e-5, "1.5e-05"),
            (1e-4, "0.0001"),
            (1e100, "1e+100"),
            (f64::NEG_INFINITY, "-inf"),
            (f64::NAN, "nan"),
        ];
        for (number, text) in cases {
            assert_eq!(float_text(number), text);
        }
    }

    #[test]
    fn numbers_are_read_as_python_reads_them() {
        let int = |text: &str, base| match parse_integer(text, base) {
            Ok(JinjaValue::Int(number)) => Some(number),
            _ => None,
        };
        assert_eq!(
            [int(" -1_000 ", 10), int("0x1F", 16), int("0x_1f", 0)],
            [Some(-1000), Some(31), Some(31)]
        );
        assert_eq!([int("1__0", 10), int("", 10), int("1.0", 10), int("010", 0)], [None; 4]);
        assert_eq!(
            [parse_float(" 1_0.5e1 "), parse_float("-inf")],
            [Some(105.0), Some(f64::NEG_INFINITY)]
        );
        assert_eq!([parse_float("_1"), parse_float("1e"), parse_float("x")], [None; 3]);
    }
}
