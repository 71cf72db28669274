//! Scans names, numbers and string literals at the start of a text.

use num_bigint::BigInt;

/// Returns the length in bytes of the digits at the start of `text`; single underscores may separate the
/// digits.
fn digits_length(text: &str, is_digit: impl Fn(u8) -> bool) -> usize {
    let bytes = text.as_bytes();
    let mut length = 0;
    while let Some(&byte) = bytes.get(length) {
        if is_digit(byte) {
            length += 1;
        } else if byte == b'_' && length > 0 && bytes.get(length + 1).is_some_and(|&b| is_digit(b))
        {
            length += 2;
        } else {
            break;
        }
    }
    length
}

/// Length of a floating-point literal at the start of `text`: digits with a fraction or an exponent.
pub(super) fn float_length(text: &str) -> Option<usize> {
    let is_digit = |byte: u8| byte.is_ascii_digit();
    let mut length = digits_length(text, is_digit);
    if length == 0 {
        return None;
    }
    let mut is_float = false;
    if let Some(fraction) = text[length..].strip_prefix('.') {
        let digits = digits_length(fraction, is_digit);
        if digits > 0 {
            length += 1 + digits;
            is_float = true;
        }
    }
    if let Some(exponent) = text[length..].strip_prefix(['e', 'E']) {
        let unsigned = exponent.strip_prefix(['+', '-']).unwrap_or(exponent);
        let digits = digits_length(unsigned, is_digit);
        if digits > 0 {
            length += 1 + exponent.len() - unsigned.len() + digits;
            is_float = true;
        }
    }
    is_float.then_some(length)
}

/// Decimal digits and length of an integer literal at the start of `text`.
pub(super) fn integer(text: &str) -> Option<(String, usize)> {
    let prefixed = |digits: &str, radix: u32| {
        let digits = digits.strip_prefix('_').unwrap_or(digits);
        let length = digits_length(digits, |byte| (byte as char).is_digit(radix));
        let number = BigInt::parse_bytes(&digits.as_bytes()[..length], radix)?;
        Some((number.to_string(), text.len() - digits.len() + length))
    };
    let radix = match text.as_bytes().get(..2).map(|prefix| [prefix[0], prefix[1] | 0x20]) {
        Some([b'0', b'b']) => prefixed(&text[2..], 2),
        Some([b'0', b'o']) => prefixed(&text[2..], 8),
        Some([b'0', b'x']) => prefixed(&text[2..], 16),
        _ => None,
    };
    if radix.is_some() {
        return radix;
    }
    let is_zero = text.starts_with('0');
    let length =
        digits_length(text, |byte| if is_zero { byte == b'0' } else { byte.is_ascii_digit() });
    (length > 0).then(|| (text[..length].replace('_', ""), length))
}

/// Length of a name at the start of `text`.
pub(super) fn name_length(text: &str) -> Option<usize> {
    let length =
        text.len() - text.trim_start_matches(|c: char| c.is_alphanumeric() || c == '_').len();
    (length > 0).then_some(length)
}

/// Length of a string literal at the start of `text`, with its quotes; `None` if it is not closed.
pub(super) fn string_length(text: &str) -> Option<usize> {
    let quote = text.chars().next().filter(|c| matches!(c, '\'' | '"'))?;
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        if escaped {
            escaped = false;
        } else if c == '\\' {
            escaped = true;
        } else if c == quote {
            return Some(at + 1);
        }
    }
    None
}
