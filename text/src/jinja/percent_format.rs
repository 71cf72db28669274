//! Formatting of strings with `%` as in Python.

use super::error::{JinjaError, JinjaErrorKind, JinjaResult};
use super::evaluator::TemplateEvaluator;
use super::markup::escape;
use super::number_format::format_float;
use super::numbers::{PythonNumber, float_to_big};
use super::python_text::write_code;
use super::value::JinjaValue;
use num_bigint::{BigInt, Sign};
use std::iter::Peekable;
use std::str::Chars;

/// Formats `format % value`. If `is_markup`, the inserted texts are HTML-escaped.
///
/// Errors: the values do not fit the format, or a limit is exceeded.
pub(crate) fn percent_format(
    evaluator: &mut TemplateEvaluator,
    format: &str,
    is_markup: bool,
    value: &JinjaValue,
) -> JinjaResult<JinjaValue> {
    let mut formatter = PercentFormatter { value, next: 0, is_markup, out: String::new() };
    let mut chars = format.chars().peekable();
    while let Some(c) = chars.next() {
        if c == '%' {
            let before = formatter.out.len();
            formatter.conversion(evaluator, &mut chars)?;
            evaluator.charge(formatter.out.len() - before)?;
        } else {
            formatter.out.push(c);
        }
    }
    evaluator.charge(format.len())?;
    let is_mapping =
        matches!(value, JinjaValue::Dict(_) | JinjaValue::List(_) | JinjaValue::Undefined(_));
    let given = if let JinjaValue::Tuple(items) = value { items.items.len() } else { 1 };
    if formatter.next < given && !is_mapping {
        return Err(JinjaError::type_error("not all arguments converted during string formatting"));
    }
    let text = formatter.out;
    Ok(if is_markup { JinjaValue::Markup(text.into()) } else { JinjaValue::text(text) })
}

/// Flags, width and precision of one conversion such as `%-8.2f`.
#[derive(Default)]
struct ConversionSpec {
    alternate: bool,
    zero: bool,
    left: bool,
    space: bool,
    plus: bool,
    width: usize,
    precision: Option<usize>,
}

/// Formatter of strings for the operator `%`, with the output so far.
struct PercentFormatter<'a> {
    value: &'a JinjaValue,
    /// Number of values used.
    next: usize,
    is_markup: bool,
    out: String,
}

impl PercentFormatter<'_> {
    fn next_value(&mut self) -> JinjaResult<JinjaValue> {
        let value = match self.value {
            JinjaValue::Tuple(items) => items.items.get(self.next).cloned(),
            value if self.next == 0 => Some(value.clone()),
            _ => None,
        };
        self.next = self.next.saturating_add(1);
        value.ok_or_else(|| JinjaError::type_error("not enough arguments for format string"))
    }

    fn conversion(
        &mut self,
        evaluator: &mut TemplateEvaluator,
        chars: &mut Peekable<Chars<'_>>,
    ) -> JinjaResult<()> {
        let mut named = None;
        if chars.next_if_eq(&'(').is_some() {
            named = Some(self.named_value(evaluator, chars)?);
        }
        let mut spec = ConversionSpec::default();
        while let Some(flag) = chars.next_if(|c| matches!(c, '#' | '0' | '-' | ' ' | '+')) {
            match flag {
                '#' => spec.alternate = true,
                '0' => spec.zero = true,
                '-' => spec.left = true,
                ' ' => spec.space = true,
                _ => spec.plus = true,
            }
        }
        let width = self.number(chars)?;
        spec.left |= width < 0;
        spec.width = width.unsigned_abs() as usize;
        if chars.next_if_eq(&'.').is_some() {
            spec.precision = Some(usize::try_from(self.number(chars)?).unwrap_or(0));
        }
        evaluator.charge(spec.width.saturating_add(spec.precision.unwrap_or(0)))?;
        while chars.next_if(|c| matches!(c, 'h' | 'l' | 'L')).is_some() {}
        let Some(kind) = chars.next() else {
            return Err(JinjaError::value_error("incomplete format"));
        };
        if kind == '%' {
            self.out.push('%');
            return Ok(());
        }
        let value = match named {
            Some(value) => value,
            None => self.next_value()?,
        };
        let text = self.converted(evaluator, kind, &value, &spec)?;
        self.pad(&text, kind, &spec);
        Ok(())
    }

    fn named_value(
        &mut self,
        evaluator: &mut TemplateEvaluator,
        chars: &mut Peekable<Chars<'_>>,
    ) -> JinjaResult<JinjaValue> {
        let key = JinjaValue::text(key_name(chars)?);
        self.next = usize::MAX; // Named values leave none unused.
        match self.value {
            JinjaValue::Dict(dict) => {
                let missing =
                    || JinjaError::new(JinjaErrorKind::Lookup, "missing key of the format");
                dict.get(&key)?.cloned().ok_or_else(missing)
            }
            JinjaValue::Undefined(cause) => Err(cause.error()),
            value => {
                let found = evaluator.element(value, &key)?;
                found.ok_or_else(|| JinjaError::type_error("format requires a mapping"))
            }
        }
    }

    /// Reads a width or a precision from the format; for `*`, takes the number from the values to be
    /// formatted.
    fn number(&mut self, chars: &mut Peekable<Chars<'_>>) -> JinjaResult<i64> {
        if chars.next_if_eq(&'*').is_some() {
            return match self.next_value()? {
                JinjaValue::Int(number) => Ok(number),
                _ => Err(JinjaError::type_error("* wants int")),
            };
        }
        let mut number: i64 = 0;
        while let Some(digit) = chars.next_if(char::is_ascii_digit).and_then(|c| c.to_digit(10)) {
            number = number.saturating_mul(10).saturating_add(i64::from(digit));
        }
        if number > i64::from(i32::MAX) {
            return Err(JinjaError::value_error("width too big"));
        }
        Ok(number)
    }

    /// Writes a value without padding.
    fn converted(
        &self,
        evaluator: &mut TemplateEvaluator,
        kind: char,
        value: &JinjaValue,
        spec: &ConversionSpec,
    ) -> JinjaResult<String> {
        match kind {
            's' | 'r' | 'a' => {
                let is_safe = matches!(value, JinjaValue::Markup(_)) && kind == 's';
                let mut text = match kind {
                    's' => evaluator.str_of(value)?.to_string(),
                    'r' => evaluator.repr_of(value)?,
                    _ => ascii(&evaluator.repr_of(value)?),
                };
                if self.is_markup && !is_safe {
                    text = escape(&text);
                }
                Ok(match spec.precision {
                    Some(precision) => text.chars().take(precision).collect(),
                    None => text,
                })
            }
            'd' | 'i' | 'u' => {
                let number = match number_of(kind, value)? {
                    PythonNumber::Float(float) if float.is_finite() => float_to_big(float),
                    PythonNumber::Float(_) => {
                        let message = "cannot convert float infinity or NaN to integer";
                        return Err(JinjaError::new(JinjaErrorKind::Overflow, message));
                    }
                    number => number.to_big(),
                };
                let digits = super::numbers::big_text(&absolute(&number))?;
                Ok(signed(number.sign() == Sign::Minus, &with_digits(digits, spec), spec))
            }
            'o' | 'x' | 'X' => {
                let number = match PythonNumber::of(value) {
                    Some(PythonNumber::Float(_)) | None => {
                        let found = value.type_name();
                        let message =
                            format!("%{kind} format: an integer is required, not {found}");
                        return Err(JinjaError::type_error(message));
                    }
                    Some(number) => number.to_big(),
                };
                let radix = if kind == 'o' { 8 } else { 16 };
                let digits = with_digits(absolute(&number).to_str_radix(radix), spec);
                let prefix = if spec.alternate { format!("0{kind}") } else { String::new() };
                let digits = if kind == 'X' { digits.to_uppercase() } else { digits };
                Ok(signed(number.sign() == Sign::Minus, &(prefix + &digits), spec))
            }
            'e' | 'E' | 'f' | 'F' | 'g' | 'G' => {
                let number = number_of(kind, value)?.to_float()?;
                let precision = spec.precision.unwrap_or(6);
                let digits =
                    format_float(number, kind.to_ascii_lowercase(), precision, spec.alternate);
                let digits = if kind.is_uppercase() { digits.to_uppercase() } else { digits };
                Ok(signed(number.is_sign_negative() && !number.is_nan(), &digits, spec))
            }
            'c' => character(value),
            _ => {
                let code = kind as u32;
                let message = format!("unsupported format character '{kind}' ({code:#x})");
                Err(JinjaError::value_error(message))
            }
        }
    }

    /// Appends a converted value with padding.
    fn pad(&mut self, text: &str, kind: char, spec: &ConversionSpec) {
        let missing = spec.width.saturating_sub(text.chars().count());
        let is_number = !matches!(kind, 's' | 'r' | 'a' | 'c');
        if spec.left {
            self.out.push_str(text);
            self.out.extend(std::iter::repeat_n(' ', missing));
        } else if spec.zero && is_number {
            let sign = usize::from(text.starts_with(['-', '+', ' ']));
            let prefix = if spec.alternate && matches!(kind, 'o' | 'x' | 'X') { 2 } else { 0 };
            self.out.push_str(&text[..sign + prefix]);
            self.out.extend(std::iter::repeat_n('0', missing));
            self.out.push_str(&text[sign + prefix..]);
        } else {
            self.out.extend(std::iter::repeat_n(' ', missing));
            self.out.push_str(text);
        }
    }
}

fn number_of(kind: char, value: &JinjaValue) -> JinjaResult<PythonNumber> {
    if let JinjaValue::Undefined(cause) = value {
        return Err(cause.error());
    }
    PythonNumber::of(value).ok_or_else(|| {
        let found = value.type_name();
        JinjaError::type_error(format!("%{kind} format: a real number is required, not {found}"))
    })
}

fn absolute(number: &BigInt) -> BigInt {
    if number.sign() == Sign::Minus { -number } else { number.clone() }
}

/// Adds leading zeros up to the precision, which is the minimum number of digits of an integer.
fn with_digits(digits: String, spec: &ConversionSpec) -> String {
    let missing = spec.precision.unwrap_or(0).saturating_sub(digits.len());
    if missing == 0 { digits } else { "0".repeat(missing) + &digits }
}

fn signed(is_negative: bool, digits: &str, spec: &ConversionSpec) -> String {
    let sign = match (is_negative, spec.plus, spec.space) {
        (true, _, _) => "-",
        (false, true, _) => "+",
        (false, false, true) => " ",
        (false, false, false) => "",
    };
    format!("{sign}{digits}")
}

/// Removes the key of a named value and its closing bracket from `chars`.
fn key_name(chars: &mut Peekable<Chars<'_>>) -> JinjaResult<String> {
    let mut name = String::new();
    let mut depth = 1;
    loop {
        let Some(c) = chars.next() else {
            return Err(JinjaError::value_error("incomplete format key"));
        };
        match c {
            '(' => depth += 1,
            ')' if depth == 1 => return Ok(name),
            ')' => depth -= 1,
            _ => {}
        }
        name.push(c);
    }
}

fn character(value: &JinjaValue) -> JinjaResult<String> {
    let found = match value {
        JinjaValue::Str(text) | JinjaValue::Markup(text) => {
            let mut chars = text.chars();
            chars.next().filter(|_| chars.next().is_none())
        }
        JinjaValue::Int(code) => {
            let found = u32::try_from(*code).ok().and_then(char::from_u32);
            let message = "%c arg not in range(0x110000)";
            return found
                .map(String::from)
                .ok_or_else(|| JinjaError::new(JinjaErrorKind::Overflow, message));
        }
        _ => None,
    };
    found.map(String::from).ok_or_else(|| JinjaError::type_error("%c requires int or char"))
}

/// Escapes non-ASCII characters.
pub(crate) fn ascii(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_ascii() {
            out.push(c);
        } else {
            write_code(c, &mut out);
        }
    }
    out
}
