//! Escapes in string literals, decoded as Python's `unicode-escape` codec does after Jinja2's encoding to
//! ASCII.

use std::fmt::Write as _;

/// Decodes the escapes of a string literal.
///
/// Errors: an escape is cut short, names no character, or is a named character (`\N{…}`).
pub(crate) fn unescape(literal: &str) -> Result<String, String> {
    if !literal.contains('\\') {
        return Ok(literal.to_owned());
    }
    // Jinja2 first encodes non-ASCII characters as escapes, so a backslash before such a character escapes
    // the backslash of that encoding.
    let mut ascii = String::with_capacity(literal.len());
    for c in literal.chars() {
        let _infallible = match c as u32 {
            0..=0x7f => {
                ascii.push(c);
                Ok(())
            }
            code @ 0x80..=0xff => write!(ascii, "\\x{code:02x}"),
            code @ 0x100..=0xffff => write!(ascii, "\\u{code:04x}"),
            code => write!(ascii, "\\U{code:08x}"),
        };
    }
    let mut out = String::with_capacity(literal.len());
    let mut rest = ascii.as_str();
    while let Some(at) = rest.find('\\') {
        out.push_str(&rest[..at]);
        rest = escape(&rest[at + 1..], &mut out)?;
    }
    out.push_str(rest);
    Ok(out)
}

/// Decodes the escape after a backslash; returns the text that follows it.
fn escape<'a>(text: &'a str, out: &mut String) -> Result<&'a str, String> {
    let Some(c) = text.chars().next() else { return Err("\\ at end of string".to_owned()) };
    let rest = &text[1..];
    let plain = match c {
        '\n' => return Ok(rest),
        '\\' | '\'' | '"' => c,
        'a' => '\u{7}',
        'b' => '\u{8}',
        'f' => '\u{c}',
        'n' => '\n',
        'r' => '\r',
        't' => '\t',
        'v' => '\u{b}',
        'x' => return hexadecimal(rest, 2, "truncated \\xXX escape", out),
        'u' => return hexadecimal(rest, 4, "truncated \\uXXXX escape", out),
        'U' => return hexadecimal(rest, 8, "truncated \\UXXXXXXXX escape", out),
        'N' => return Err("named characters (\\N) are unsupported".to_owned()),
        '0'..='7' => return Ok(octal(text, out)),
        _ => {
            out.push('\\');
            c
        }
    };
    out.push(plain);
    Ok(rest)
}

/// Decodes an octal escape of up to three digits; returns the text that follows it.
fn octal<'a>(text: &'a str, out: &mut String) -> &'a str {
    let length = text.bytes().take(3).take_while(|b| (b'0'..=b'7').contains(b)).count();
    let code = u32::from_str_radix(&text[..length], 8).unwrap_or(0);
    out.push(char::from_u32(code).unwrap_or_default());
    &text[length..]
}

fn hexadecimal<'a>(
    text: &'a str,
    digits: usize,
    truncated: &str,
    out: &mut String,
) -> Result<&'a str, String> {
    let code = text.get(..digits).filter(|code| code.bytes().all(|b| b.is_ascii_hexdigit()));
    let code = code.ok_or_else(|| truncated.to_owned())?;
    let code = u32::from_str_radix(code, 16).ok().and_then(char::from_u32);
    out.push(code.ok_or_else(|| "illegal Unicode character".to_owned())?);
    Ok(&text[digits..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_are_those_of_python() {
        let cases = [
            (r"a\n\t\\\'", "a\n\t\\'"),
            (r"\101\x41\u00e9\U0001F600", "AAé😀"),
            (r"\d\é", "\\d\\xe9"),
            ("é", "é"),
            ("a\\\nb", "ab"),
        ];
        for (literal, text) in cases {
            assert_eq!(unescape(literal).as_deref(), Ok(text), "{literal}");
        }
        for invalid in [r"\x4", r"\u12", r"\ud800", r"\N{DASH}"] {
            assert!(unescape(invalid).is_err(), "{invalid}");
        }
    }
}
