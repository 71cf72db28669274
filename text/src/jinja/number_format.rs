//! Text of numbers in the formats of C's `printf`, which Python's `%` and `format` share.

use super::numbers::with_python_exponent;

/// Maximum number of decimal places that a float can have.
const FLOAT_DIGITS_MAX: usize = 1_100;

/// Writes the absolute value of a float in the format `e`, `f` or `g`, in lower case. With `alternate`, the
/// format `g` keeps the decimal point and trailing zeros.
pub(crate) fn format_float(number: f64, kind: char, precision: usize, alternate: bool) -> String {
    if number.is_nan() {
        return "nan".to_owned();
    }
    let number = number.abs();
    if number.is_infinite() {
        return "inf".to_owned();
    }
    match kind {
        'e' => {
            let text = exponential(number, precision);
            if alternate && precision == 0 { text.replacen('e', ".e", 1) } else { text }
        }
        'f' => {
            let text = fixed(number, precision);
            if alternate && precision == 0 { text + "." } else { text }
        }
        _ => general(number, precision, alternate),
    }
}

fn fixed(number: f64, precision: usize) -> String {
    let digits = precision.min(FLOAT_DIGITS_MAX);
    let mut text = format!("{number:.digits$}");
    text.extend(std::iter::repeat_n('0', precision - digits));
    text
}

fn exponential(number: f64, precision: usize) -> String {
    let digits = precision.min(FLOAT_DIGITS_MAX);
    let text = with_python_exponent(&format!("{number:.digits$e}"));
    let zeros = "0".repeat(precision - digits);
    text.replacen('e', &(zeros + "e"), 1)
}

fn general(number: f64, precision: usize, alternate: bool) -> String {
    let precision = precision.max(1);
    let exponent = decimal_exponent(number, precision);
    if exponent < -4 || exponent >= precision as i64 {
        let text = exponential(number, precision - 1);
        if alternate {
            return text;
        }
        let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "+00"));
        return format!("{}e{exponent}", without_zeros(mantissa));
    }
    let text = fixed(number, (precision as i64 - 1 - exponent) as usize);
    if alternate {
        return if text.contains('.') { text } else { text + "." };
    }
    without_zeros(&text).to_owned()
}

/// Returns the decimal exponent of a number rounded to `precision` significant digits.
pub(crate) fn decimal_exponent(number: f64, precision: usize) -> i64 {
    let digits = precision.clamp(1, FLOAT_DIGITS_MAX) - 1;
    let text = format!("{number:.digits$e}");
    text.split_once('e').and_then(|(_, exponent)| exponent.parse().ok()).unwrap_or(0)
}

/// Removes trailing zeros of a fraction.
pub(crate) fn without_zeros(text: &str) -> &str {
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_have_the_formats_of_c() {
        let cases = [
            ((1234.5, 'e', 2), "1.23e+03"),
            ((0.5, 'f', 0), "0"),
            ((2.5, 'f', 0), "2"),
            ((1e22, 'f', 1), "10000000000000000000000.0"),
            ((0.0001, 'g', 6), "0.0001"),
            ((0.00001, 'g', 6), "1e-05"),
            ((123_456_789.0, 'g', 6), "1.23457e+08"),
            ((100.0, 'g', 3), "100"),
        ];
        for ((number, kind, precision), text) in cases {
            assert_eq!(format_float(number, kind, precision, false), text);
        }
    }
}
