//! Methods that split and join strings.

use super::super::arguments::{CallArguments, flag, given, integer_or, text_argument};
use super::super::error::{JinjaError, JinjaResult};
use super::super::evaluator::TemplateEvaluator;
use super::super::iteration::ValueIterator;
use super::super::markup::escape_value;
use super::super::python_text::is_space;
use super::super::value::JinjaValue;
use super::MethodFunction;

/// Returns the method `name`.
pub(super) fn find(name: &str) -> Option<MethodFunction> {
    Some(match name {
        "split" => |evaluator, value, arguments| split(evaluator, value, arguments, false),
        "rsplit" => |evaluator, value, arguments| split(evaluator, value, arguments, true),
        "splitlines" => |evaluator, value, arguments| {
            let [keep_ends] = arguments.bind("splitlines", ["keepends"], 0)?;
            let text = value.as_str().unwrap_or_default();
            list(evaluator, value, split_lines(text, flag(keep_ends.as_ref(), false)))
        },
        "join" => join,
        _ => return None,
    })
}

fn list(
    evaluator: &mut TemplateEvaluator,
    like: &JinjaValue,
    parts: Vec<&str>,
) -> JinjaResult<JinjaValue> {
    let bytes: usize = parts.iter().map(|part| part.len()).sum();
    evaluator.charge(bytes + parts.len() * size_of::<JinjaValue>())?;
    evaluator.spend_bytes(bytes)?;
    JinjaValue::list(parts.into_iter().map(|part| JinjaValue::text_like(like, part)).collect())
}

fn split(
    evaluator: &mut TemplateEvaluator,
    value: &JinjaValue,
    arguments: CallArguments,
    from_end: bool,
) -> JinjaResult<JinjaValue> {
    let [separator, count] = arguments.bind("split", ["sep", "maxsplit"], 0)?;
    let count = integer_or(count.as_ref(), -1)?;
    let limit = usize::try_from(count).unwrap_or(usize::MAX);
    let text = value.as_str().unwrap_or_default();
    let separator = given(separator).map(|value| text_argument("split", &value)).transpose()?;
    let parts = match separator {
        Some(separator) if separator.is_empty() => {
            return Err(JinjaError::value_error("empty separator"));
        }
        Some(separator) if from_end => {
            let mut parts: Vec<&str> = text.rsplitn(limit.saturating_add(1), &*separator).collect();
            parts.reverse();
            parts
        }
        Some(separator) => text.splitn(limit.saturating_add(1), &*separator).collect(),
        None if from_end => split_space_from_end(text, limit),
        None => split_space(text, limit),
    };
    list(evaluator, value, parts)
}

/// Splits a string at white space, at most `limit` times.
pub(crate) fn split_space(text: &str, limit: usize) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = text.trim_start_matches(is_space);
    while !rest.is_empty() {
        if parts.len() == limit {
            parts.push(rest);
            break;
        }
        let end = rest.find(is_space).unwrap_or(rest.len());
        parts.push(&rest[..end]);
        rest = rest[end..].trim_start_matches(is_space);
    }
    parts
}

fn split_space_from_end(text: &str, limit: usize) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = text.trim_end_matches(is_space);
    while !rest.is_empty() {
        if parts.len() == limit {
            parts.push(rest);
            break;
        }
        let start = rest.char_indices().rev().find(|(_, c)| is_space(*c));
        let start = start.map_or(0, |(at, c)| at + c.len_utf8());
        parts.push(&rest[start..]);
        rest = rest[..start].trim_end_matches(is_space);
    }
    parts.reverse();
    parts
}

/// Splits a string at the characters that Python counts as line breaks.
pub(crate) fn split_lines(text: &str, keep_ends: bool) -> Vec<&str> {
    let mut lines = Vec::new();
    let mut start = 0;
    let mut chars = text.char_indices().peekable();
    while let Some((at, c)) = chars.next() {
        let is_break = matches!(
            c,
            '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'
                ..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}'
        );
        if !is_break {
            continue;
        }
        let mut end = at + c.len_utf8();
        if c == '\r' && chars.next_if(|(_, next)| *next == '\n').is_some() {
            end += 1;
        }
        lines.push(&text[start..if keep_ends { end } else { at }]);
        start = end;
    }
    if start < text.len() {
        lines.push(&text[start..]);
    }
    lines
}

fn join(
    evaluator: &mut TemplateEvaluator,
    value: &JinjaValue,
    arguments: CallArguments,
) -> JinjaResult<JinjaValue> {
    let [items] = arguments.bind_positional("join", 1)?;
    let is_markup = matches!(value, JinjaValue::Markup(_));
    let separator = value.as_str().unwrap_or_default();
    let mut items = ValueIterator::new(&items.unwrap_or(JinjaValue::None))?;
    let mut out = String::new();
    let mut count = 0;
    while let Some(item) = items.next(evaluator)? {
        if item.as_str().is_none() && !is_markup {
            let kind = item.type_name();
            let message = format!("sequence item {count}: expected str instance, {kind} found");
            return Err(JinjaError::type_error(message));
        }
        let text =
            if is_markup { escape_value(evaluator, &item)? } else { evaluator.str_of(&item)? };
        evaluator.charge(text.len() + separator.len())?;
        if count > 0 {
            out.push_str(separator);
        }
        count += 1;
        out.push_str(&text);
    }
    Ok(JinjaValue::text_like(value, out))
}
