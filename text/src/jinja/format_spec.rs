//! Format specifications of `str.format`, such as `>8.2f`.

use super::error::{JinjaError, JinjaResult};
use super::evaluator::TemplateEvaluator;
use super::number_format::{decimal_exponent, format_float};
use super::numbers::{PythonNumber, big_text, float_text};
use super::value::JinjaValue;
use num_bigint::Sign;

/// Parsed format specification.
#[derive(Debug, Default)]
struct FormatSpec {
    fill: Option<char>,
    align: Option<char>,
    sign: Option<char>,
    alternate: bool,
    width: usize,
    grouping: Option<char>,
    precision: Option<usize>,
    kind: Option<char>,
}

impl FormatSpec {
    /// Removes the fill character and the alignment from the end of `rest`.
    fn take_alignment(&mut self, rest: &mut Vec<char>) {
        let is_align = |c: Option<&char>| c.is_some_and(|c| matches!(c, '<' | '>' | '=' | '^'));
        let last = rest.len();
        if last >= 2 && is_align(rest.get(last - 2)) {
            self.fill = rest.pop();
            self.align = rest.pop();
        } else if is_align(rest.last()) {
            self.align = rest.pop();
        }
    }

    fn parse(text: &str) -> JinjaResult<Self> {
        let mut spec = Self::default();
        let mut rest: Vec<char> = text.chars().collect();
        rest.reverse(); // Characters are taken from the end of the list.
        spec.take_alignment(&mut rest);
        if rest.last().is_some_and(|c| matches!(c, '+' | '-' | ' ')) {
            spec.sign = rest.pop();
        }
        if rest.pop_if(|c| *c == '#').is_some() {
            spec.alternate = true;
        }
        if rest.last() == Some(&'0') && spec.fill.is_none() {
            spec.fill = rest.pop();
            spec.align = spec.align.or(Some('='));
        }
        spec.width = digits(&mut rest)?.unwrap_or(0);
        spec.grouping = rest.pop_if(|c| matches!(c, ',' | '_'));
        if rest.pop_if(|c| *c == '.').is_some() {
            let missing = || JinjaError::value_error("Format specifier missing precision");
            spec.precision = Some(digits(&mut rest)?.ok_or_else(missing)?);
        }
        spec.kind = rest.pop();
        if rest.is_empty() {
            Ok(spec)
        } else {
            Err(JinjaError::value_error("Invalid format specifier"))
        }
    }

    /// Pads `text` to the width. With the alignment `=`, the fill characters are inserted after the sign.
    fn pad(&self, text: String, default_align: char) -> String {
        let missing = self.width.saturating_sub(text.chars().count());
        let fill = |count: usize| self.fill.unwrap_or(' ').to_string().repeat(count);
        match self.align.unwrap_or(default_align) {
            '<' => text + &fill(missing),
            '^' => fill(missing / 2) + &text + &fill(missing - missing / 2),
            '=' => {
                let mut at = usize::from(text.starts_with(['-', '+', ' ']));
                let has_prefix = self.alternate
                    && matches!(self.kind, Some('x' | 'X' | 'o' | 'b'))
                    && text[at..].starts_with('0');
                at += if has_prefix { 2 } else { 0 };
                format!("{}{}{}", &text[..at], fill(missing), &text[at..])
            }
            _ => fill(missing) + &text,
        }
    }

    fn signed(&self, is_negative: bool, digits: &str) -> String {
        let sign = match (is_negative, self.sign) {
            (true, _) => "-",
            (false, Some('+')) => "+",
            (false, Some(' ')) => " ",
            (false, _) => "",
        };
        format!("{sign}{digits}")
    }

    /// Inserts separators between groups of `size` digits into the integer part of `digits`, and leading
    /// zeros up to the width if the fill character is zero.
    fn grouped(&self, digits: &str, size: usize, sign_length: usize) -> String {
        let Some(separator) = self.grouping else { return digits.to_owned() };
        let whole = digits.find(|c: char| !c.is_ascii_hexdigit()).unwrap_or(digits.len());
        let (whole, rest) = digits.split_at(whole);
        let is_zero_filled = self.fill == Some('0') && self.align == Some('=');
        let mut whole = whole.to_owned();
        loop {
            let length = whole.len() + (whole.len().max(1) - 1) / size + rest.len() + sign_length;
            if !is_zero_filled || length >= self.width {
                break;
            }
            whole.insert(0, '0');
        }
        let mut out = String::new();
        for (index, c) in whole.chars().enumerate() {
            if index > 0 && (whole.len() - index) % size == 0 {
                out.push(separator);
            }
            out.push(c);
        }
        out + rest
    }
}

fn digits(rest: &mut Vec<char>) -> JinjaResult<Option<usize>> {
    let mut number: Option<usize> = None;
    while let Some(digit) = rest.pop_if(|c| c.is_ascii_digit()) {
        let digit = digit.to_digit(10).unwrap_or(0) as usize;
        number = Some(number.unwrap_or(0).saturating_mul(10).saturating_add(digit));
    }
    if number.is_some_and(|number| number > i32::MAX as usize) {
        return Err(JinjaError::value_error("Too many decimal digits in format string"));
    }
    Ok(number)
}

/// Formats a value as Python's `format(value, spec)` does.
///
/// Errors: the specification does not fit the value, or a limit is exceeded.
pub(crate) fn format_value(
    evaluator: &mut TemplateEvaluator,
    value: &JinjaValue,
    spec: &str,
) -> JinjaResult<String> {
    if spec.is_empty() {
        return Ok(evaluator.str_of(value)?.to_string());
    }
    if let JinjaValue::Undefined(_) = value {
        return Err(unsupported(value));
    }
    let spec = FormatSpec::parse(spec)?;
    evaluator.charge(spec.width.saturating_add(spec.precision.unwrap_or(0)).saturating_mul(4))?;
    if let Some(text) = value.as_str() {
        return format_text(text, &spec);
    }
    let Some(number) = PythonNumber::of(value) else { return Err(unsupported(value)) };
    match (&number, spec.kind) {
        (PythonNumber::Float(float), kind) => format_float_spec(*float, kind, &spec),
        (_, Some('e' | 'E' | 'f' | 'F' | 'g' | 'G' | '%')) => {
            format_float_spec(number.to_float()?, spec.kind, &spec)
        }
        _ => format_integer(&number, &spec),
    }
}

fn unsupported(value: &JinjaValue) -> JinjaError {
    let kind = value.type_name();
    JinjaError::type_error(format!("unsupported format string passed to {kind}.__format__"))
}

fn unknown_kind(kind: char, value: &str) -> JinjaError {
    let message = format!("Unknown format code '{kind}' for object of type '{value}'");
    JinjaError::value_error(message)
}

fn format_text(text: &str, spec: &FormatSpec) -> JinjaResult<String> {
    if let Some(kind) = spec.kind.filter(|kind| *kind != 's') {
        return Err(unknown_kind(kind, "str"));
    }
    // A zero before the width sets the alignment `=`, which is an error for a string only if it is explicit.
    let aligned_by_zero = spec.fill == Some('0') && spec.align == Some('=');
    let invalid = spec.sign.is_some() || spec.alternate || spec.grouping.is_some();
    if invalid || spec.align == Some('=') && !aligned_by_zero {
        return Err(JinjaError::value_error("invalid format specifier for a string"));
    }
    let text: String = match spec.precision {
        Some(precision) => text.chars().take(precision).collect(),
        None => text.to_owned(),
    };
    if aligned_by_zero {
        let missing = spec.width.saturating_sub(text.chars().count());
        return Ok(text + &"0".repeat(missing));
    }
    Ok(spec.pad(text, '<'))
}

fn format_integer(number: &PythonNumber, spec: &FormatSpec) -> JinjaResult<String> {
    let big = number.to_big();
    let is_negative = big.sign() == Sign::Minus;
    let magnitude = if is_negative { -big } else { big };
    if spec.precision.is_some() {
        return Err(JinjaError::value_error("Precision not allowed in integer format specifier"));
    }
    let (digits, prefix, group) = match spec.kind {
        None | Some('d' | 'n') => (big_text(&magnitude)?, "", 3),
        Some('b') => (magnitude.to_str_radix(2), "0b", 4),
        Some('o') => (magnitude.to_str_radix(8), "0o", 4),
        Some('x') => (magnitude.to_str_radix(16), "0x", 4),
        Some('X') => (magnitude.to_str_radix(16).to_uppercase(), "0X", 4),
        Some('c') => {
            let code = u32::try_from(&magnitude).ok().filter(|_| !is_negative);
            let found = code.and_then(char::from_u32);
            let found =
                found.ok_or_else(|| JinjaError::value_error("%c arg not in range(0x110000)"))?;
            return Ok(spec.pad(found.to_string(), '<'));
        }
        Some(kind) => return Err(unknown_kind(kind, "int")),
    };
    if spec.grouping == Some(',') && group == 4 {
        return Err(JinjaError::value_error("Cannot specify ',' with this format code."));
    }
    let prefix = if spec.alternate { prefix } else { "" };
    let sign_length = spec.signed(is_negative, "").len() + prefix.len();
    let digits = format!("{prefix}{}", spec.grouped(&digits, group, sign_length));
    Ok(spec.pad(spec.signed(is_negative, &digits), '>'))
}

fn format_float_spec(number: f64, kind: Option<char>, spec: &FormatSpec) -> JinjaResult<String> {
    let precision = spec.precision.unwrap_or(6);
    let digits = match kind {
        None => match spec.precision {
            None => float_text(number.abs()),
            Some(precision) => plain_float(number, precision, spec.alternate),
        },
        Some('n') => format_float(number, 'g', precision, spec.alternate),
        Some('%') => format_float(number * 100.0, 'f', precision, spec.alternate) + "%",
        Some(kind @ ('e' | 'E' | 'f' | 'F' | 'g' | 'G')) => {
            let text = format_float(number, kind.to_ascii_lowercase(), precision, spec.alternate);
            if kind.is_uppercase() { text.to_uppercase() } else { text }
        }
        Some(kind) => return Err(unknown_kind(kind, "float")),
    };
    let is_negative = number.is_sign_negative() && !number.is_nan();
    let sign_length = spec.signed(is_negative, "").len();
    let digits = spec.grouped(&digits, 3, sign_length);
    Ok(spec.pad(spec.signed(is_negative, &digits), '>'))
}

/// Formats a float as Python does without a presentation type: as `g`, but with at least one digit after the
/// decimal point.
fn plain_float(number: f64, precision: usize, alternate: bool) -> String {
    let magnitude = number.abs();
    let precision = precision.max(1);
    let text = format_float(magnitude, 'g', precision, alternate);
    if !magnitude.is_finite() || text.contains(['.', 'e']) {
        return text;
    }
    // Fixed notation with the suffix `.0` would have one digit more than the precision, so exponential
    // notation is used.
    if decimal_exponent(magnitude, precision) >= precision as i64 - 1 {
        let text = super::number_format::format_float(magnitude, 'e', precision - 1, alternate);
        let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "+00"));
        return format!("{}e{exponent}", super::number_format::without_zeros(mantissa));
    }
    text + ".0"
}
