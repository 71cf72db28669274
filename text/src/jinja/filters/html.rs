//! Filters for HTML and URLs.

use super::super::arguments::{CallArguments, flag};
use super::super::error::{JinjaError, JinjaResult};
use super::super::evaluator::TemplateEvaluator;
use super::super::iteration::ValueIterator;
use super::super::markup::{escape, escape_value};
use super::super::methods::text_split::split_space;
use super::super::python_text::quote;
use super::super::value::JinjaValue;
use super::FilterFunction;
use crate::special_token_guard::may_be_sentinel;
use std::fmt::Write as _;
use std::sync::Arc;

/// HTML named character references that are decoded; any other reference in a text is an error.
const ENTITIES: [(&str, char); 12] = [
    ("amp", '&'),
    ("lt", '<'),
    ("gt", '>'),
    ("quot", '"'),
    ("apos", '\''),
    ("nbsp", '\u{a0}'),
    ("copy", '©'),
    ("reg", '®'),
    ("raquo", '»'),
    ("laquo", '«'),
    ("hellip", '…'),
    ("mdash", '—'),
];

/// Returns the filter `name`.
pub(super) fn find(name: &str) -> Option<FilterFunction> {
    Some(match name {
        "safe" => |evaluator, value, arguments| {
            arguments.expect_none("safe")?;
            Ok(JinjaValue::Markup(evaluator.str_of(value)?))
        },
        "escape" | "e" => |evaluator, value, arguments| {
            arguments.expect_none("escape")?;
            Ok(JinjaValue::Markup(escape_value(evaluator, value)?))
        },
        "forceescape" => |evaluator, value, arguments| {
            arguments.expect_none("forceescape")?;
            let text = evaluator.str_of(value)?;
            evaluator.charge(text.len().saturating_mul(5))?;
            Ok(JinjaValue::Markup(escape(&text).into()))
        },
        "striptags" => |evaluator, value, arguments| {
            arguments.expect_none("striptags")?;
            let text = evaluator.str_of(value)?;
            strip_tags(evaluator, &text)
        },
        "xmlattr" => xml_attributes,
        "urlencode" => url_encode,
        "urlize" => |_, _, _| Err(JinjaError::unsupported("the filter 'urlize' is unsupported")),
        _ => return None,
    })
}

/// Removes comments and tags, collapses white space and decodes named character references.
///
/// Errors: a named character reference is unknown, or a limit is exceeded.
pub(crate) fn strip_tags(evaluator: &mut TemplateEvaluator, text: &str) -> JinjaResult<JinjaValue> {
    evaluator.charge(text.len().saturating_mul(4))?;
    evaluator.spend_bytes(text.len())?;
    let text = without_between(text, "<!--", "-->");
    let text = without_between(&text, "<", ">");
    let words = split_space(&text, usize::MAX).join(" ");
    Ok(JinjaValue::text(unescape(&words)?))
}

/// Removes every section of `text` that begins with `open` and ends with the next `close`.
fn without_between(text: &str, open: &str, close: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find(open) {
        let Some(end) = rest[start..].find(close) else { break };
        out.push_str(&rest[..start]);
        rest = &rest[start + end + close.len()..];
    }
    out + rest
}

/// Returns the character with the given entity name, such as `amp` or `#39`.
fn entity(name: &str) -> Option<char> {
    match name.strip_prefix('#') {
        Some(number) => match number.strip_prefix(['x', 'X']) {
            Some(digits) => u32::from_str_radix(digits, 16).ok(),
            None => number.parse().ok(),
        }
        .filter(|code| !matches!(code, 0 | 0x80..=0x9f))
        .and_then(char::from_u32),
        None => ENTITIES.iter().find(|(known, _)| *known == name).map(|(_, c)| *c),
    }
}

fn unescape(text: &str) -> JinjaResult<String> {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('&') {
        out.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        let length =
            rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '#').unwrap_or(rest.len());
        let name = &rest[..length];
        let is_closed = rest[length..].starts_with(';');
        match entity(name) {
            Some(c) if is_closed => {
                out.push(c);
                rest = &rest[length + 1..];
            }
            None if name.is_empty() => out.push('&'),
            _ => {
                let message = format!("the character '&{name}' of HTML is unsupported");
                return Err(JinjaError::unsupported(message));
            }
        }
    }
    out.push_str(rest);
    Ok(out)
}

fn xml_attributes(
    evaluator: &mut TemplateEvaluator,
    value: &JinjaValue,
    arguments: CallArguments,
) -> JinjaResult<JinjaValue> {
    let [space] = arguments.bind("xmlattr", ["autospace"], 0)?;
    let dict = match value {
        JinjaValue::Dict(dict) => dict,
        JinjaValue::Undefined(cause) => return Err(cause.error()),
        _ => {
            let kind = value.type_name();
            return Err(JinjaError::type_error(format!(
                "'{kind}' object has no attribute 'items'"
            )));
        }
    };
    let mut parts = Vec::new();
    for entry in dict.entries() {
        if matches!(entry.value, JinjaValue::None | JinjaValue::Undefined(_)) {
            continue;
        }
        let Some(key) = entry.key.as_str() else {
            return Err(JinjaError::type_error("expected string or bytes-like object"));
        };
        let is_invalid =
            |c: char| matches!(c, ' ' | '\t' | '\n' | '\r' | '\u{b}' | '\u{c}' | '/' | '>' | '=');
        if key.contains(is_invalid) {
            let message = format!("Invalid character in attribute name: {}", quote(key));
            return Err(JinjaError::value_error(message));
        }
        let key = escape_value(evaluator, &entry.key)?;
        let value = escape_value(evaluator, &entry.value)?;
        evaluator.charge(key.len() + value.len())?;
        parts.push(format!("{key}=\"{value}\""));
    }
    let mut text = parts.join(" ");
    if flag(space.as_ref(), true) && !text.is_empty() {
        text.insert(0, ' ');
    }
    Ok(JinjaValue::text(text))
}

fn url_encode(
    evaluator: &mut TemplateEvaluator,
    value: &JinjaValue,
    arguments: CallArguments,
) -> JinjaResult<JinjaValue> {
    arguments.expect_none("urlencode")?;
    let is_plain = value.as_str().is_some() || ValueIterator::new(value).is_err();
    if is_plain {
        return Ok(JinjaValue::text(url_quoted(evaluator, value, false)?));
    }
    let mut parts = Vec::new();
    if let JinjaValue::Dict(dict) = value {
        for entry in dict.entries() {
            let key = url_quoted(evaluator, &entry.key, true)?;
            parts.push(format!("{key}={}", url_quoted(evaluator, &entry.value, true)?));
        }
    } else {
        for pair in evaluator.collect(value)? {
            let items = evaluator.collect(&pair)?;
            let [key, value] = &items[..] else {
                return Err(JinjaError::value_error("expected pairs of a key and a value"));
            };
            let key = url_quoted(evaluator, key, true)?;
            parts.push(format!("{key}={}", url_quoted(evaluator, value, true)?));
        }
    }
    Ok(JinjaValue::text(parts.join("&")))
}

/// Returns the text of a value in a URL; bytes are decoded as UTF-8.
fn url_text(evaluator: &mut TemplateEvaluator, value: &JinjaValue) -> JinjaResult<Arc<str>> {
    match value {
        JinjaValue::Bytes(bytes) => std::str::from_utf8(bytes)
            .map(Arc::from)
            .map_err(|_| JinjaError::unsupported("URLs of other bytes than UTF-8")),
        _ => evaluator.str_of(value),
    }
}

/// Percent-encodes a value for a URL; in a query string, a space becomes `+` and `/` is encoded too.
fn url_quoted(
    evaluator: &mut TemplateEvaluator,
    value: &JinjaValue,
    in_query: bool,
) -> JinjaResult<String> {
    let text = url_text(evaluator, value)?;
    evaluator.charge(text.len().saturating_mul(3))?;
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            c if c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-' | '~') => out.push(c),
            '/' if !in_query => out.push('/'),
            ' ' if in_query => out.push('+'),
            c if may_be_sentinel(c) => out.push(c),
            c => {
                for byte in c.encode_utf8(&mut [0; 4]).bytes() {
                    let _infallible = write!(out, "%{byte:02X}");
                }
            }
        }
    }
    Ok(out)
}
