//! Methods that search in strings, and methods that replace parts of strings.

use super::super::arguments::{CallArguments, given, integer_argument, integer_or, text_argument};
use super::super::error::{JinjaError, JinjaResult};
use super::super::evaluator::TemplateEvaluator;
use super::super::markup::escape_value;
use super::super::value::JinjaValue;
use super::MethodFunction;
use std::ops::Range;
use std::sync::Arc;

/// Returns the method `name`.
pub(super) fn find(name: &str) -> Option<MethodFunction> {
    Some(match name {
        "startswith" => |evaluator, value, arguments| affix(evaluator, value, arguments, true),
        "endswith" => |evaluator, value, arguments| affix(evaluator, value, arguments, false),
        "find" => |evaluator, value, arguments| position(evaluator, value, arguments, false, false),
        "rfind" => |evaluator, value, arguments| position(evaluator, value, arguments, true, false),
        "index" => |evaluator, value, arguments| position(evaluator, value, arguments, false, true),
        "rindex" => |evaluator, value, arguments| position(evaluator, value, arguments, true, true),
        "count" => count,
        "replace" => replace,
        "removeprefix" => |_, value, arguments| {
            let (text, part) = text_and_part("removeprefix", value, arguments)?;
            Ok(JinjaValue::text_like(value, text.strip_prefix(&*part).unwrap_or(&text)))
        },
        "removesuffix" => |_, value, arguments| {
            let (text, part) = text_and_part("removesuffix", value, arguments)?;
            Ok(JinjaValue::text_like(value, text.strip_suffix(&*part).unwrap_or(&text)))
        },
        "partition" => |evaluator, value, arguments| partition(evaluator, value, arguments, false),
        "rpartition" => |evaluator, value, arguments| partition(evaluator, value, arguments, true),
        _ => return None,
    })
}

fn replace(
    evaluator: &mut TemplateEvaluator,
    value: &JinjaValue,
    arguments: CallArguments,
) -> JinjaResult<JinjaValue> {
    let [old, new, count] = arguments.bind_positional("replace", 2)?;
    let old = text_argument("replace", &old.unwrap_or(JinjaValue::None))?;
    let new = new.unwrap_or(JinjaValue::None);
    text_argument("replace", &new)?;
    let is_markup = matches!(value, JinjaValue::Markup(_));
    let new = if is_markup { escape_value(evaluator, &new)? } else { evaluator.str_of(&new)? };
    let count = integer_or(count.as_ref(), -1)?;
    let text = value.as_str().unwrap_or_default();
    Ok(JinjaValue::text_like(value, replaced(evaluator, text, [&old, &new], count)?))
}

fn text_and_part(
    function: &str,
    value: &JinjaValue,
    arguments: CallArguments,
) -> JinjaResult<(Arc<str>, Arc<str>)> {
    let [part] = arguments.bind_positional(function, 1)?;
    let part = text_argument(function, &part.unwrap_or(JinjaValue::None))?;
    Ok((text_argument(function, value)?, part))
}

/// Converts the character range from `start` to `end` to a byte range. Negative indices count from the end of
/// the text. Returns `None` if `start` is after `end`.
pub(super) fn byte_range(text: &str, start: Option<i64>, end: Option<i64>) -> Option<Range<usize>> {
    if start.unwrap_or(0) == 0 && end.is_none() {
        return Some(0..text.len());
    }
    let length = text.chars().count() as i64;
    let absolute = |index: i64| if index < 0 { index.saturating_add(length).max(0) } else { index };
    let start = absolute(start.unwrap_or(0));
    let end = absolute(end.unwrap_or(length)).min(length);
    if start > end {
        return None;
    }
    let byte =
        |index: i64| text.char_indices().nth(index as usize).map_or(text.len(), |(at, _)| at);
    Some(byte(start)..byte(end))
}

fn bound(value: Option<JinjaValue>) -> JinjaResult<Option<i64>> {
    given(value).as_ref().map(integer_argument).transpose()
}

fn affix(
    evaluator: &mut TemplateEvaluator,
    value: &JinjaValue,
    arguments: CallArguments,
    at_start: bool,
) -> JinjaResult<JinjaValue> {
    let name = if at_start { "startswith" } else { "endswith" };
    let [part, start, end] = arguments.bind_positional(name, 1)?;
    let parts = match part {
        Some(JinjaValue::Tuple(parts)) => parts.items.clone(),
        part => part.into_iter().collect(),
    };
    let (start, end) = (bound(start)?, bound(end)?);
    let text = value.as_str().unwrap_or_default();
    if start.is_some() || end.is_some() {
        evaluator.spend_bytes(text.len())?;
    }
    let selected = byte_range(text, start, end).map(|range| &text[range]);
    for part in &parts {
        let part = text_argument(name, part)?;
        evaluator.spend(1)?;
        let found = selected.is_some_and(|text| {
            if at_start { text.starts_with(&*part) } else { text.ends_with(&*part) }
        });
        if found {
            return Ok(JinjaValue::Bool(true));
        }
    }
    Ok(JinjaValue::Bool(false))
}

fn position(
    evaluator: &mut TemplateEvaluator,
    value: &JinjaValue,
    arguments: CallArguments,
    from_end: bool,
    is_required: bool,
) -> JinjaResult<JinjaValue> {
    let [part, start, end] = arguments.bind_positional("find", 1)?;
    let part = text_argument("find", &part.unwrap_or(JinjaValue::None))?;
    let text = value.as_str().unwrap_or_default();
    evaluator.spend_bytes(text.len())?;
    let found = byte_range(text, bound(start)?, bound(end)?).and_then(|range| {
        let selected = &text[range.clone()];
        let at = if from_end { selected.rfind(&*part) } else { selected.find(&*part) };
        at.map(|at| text[..range.start + at].chars().count() as i64)
    });
    match found {
        Some(index) => Ok(JinjaValue::Int(index)),
        None if is_required => Err(JinjaError::value_error("substring not found")),
        None => Ok(JinjaValue::Int(-1)),
    }
}

fn count(
    evaluator: &mut TemplateEvaluator,
    value: &JinjaValue,
    arguments: CallArguments,
) -> JinjaResult<JinjaValue> {
    let [part, start, end] = arguments.bind_positional("count", 1)?;
    let part = text_argument("count", &part.unwrap_or(JinjaValue::None))?;
    let text = value.as_str().unwrap_or_default();
    evaluator.spend_bytes(text.len())?;
    let range = byte_range(text, bound(start)?, bound(end)?);
    let count = range.map_or(0, |range| text[range].matches(&*part).count());
    Ok(JinjaValue::Int(count as i64))
}

/// Replaces the first `count` occurrences of `pair[0]` by `pair[1]`, or all occurrences if `count` is
/// negative.
///
/// Errors: a limit is exceeded.
pub(crate) fn replaced(
    evaluator: &mut TemplateEvaluator,
    text: &str,
    pair: [&str; 2],
    count: i64,
) -> JinjaResult<String> {
    let [old, new] = pair;
    let limit = usize::try_from(count).unwrap_or(usize::MAX);
    evaluator.spend_bytes(text.len())?;
    let found = text.matches(old).take(limit).count();
    let size = (text.len() - found * old.len()).saturating_add(found.saturating_mul(new.len()));
    evaluator.charge(size)?;
    Ok(text.replacen(old, new, limit))
}

fn partition(
    evaluator: &mut TemplateEvaluator,
    value: &JinjaValue,
    arguments: CallArguments,
    from_end: bool,
) -> JinjaResult<JinjaValue> {
    let (text, part) = text_and_part("partition", value, arguments)?;
    if part.is_empty() {
        return Err(JinjaError::value_error("empty separator"));
    }
    evaluator.spend_bytes(text.len())?;
    evaluator.charge(text.len())?;
    let split = if from_end { text.rsplit_once(&*part) } else { text.split_once(&*part) };
    let parts = match split {
        Some((before, after)) => [before, &*part, after],
        None if from_end => ["", "", &*text],
        None => [&*text, "", ""],
    };
    JinjaValue::tuple(parts.iter().map(|part| JinjaValue::text_like(value, *part)).collect())
}
