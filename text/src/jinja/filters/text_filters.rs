//! Filters of strings.

use super::super::arguments::{
    CallArguments, flag, given, integer_argument, integer_or, text_argument,
};
use super::super::error::{JinjaError, JinjaResult};
use super::super::evaluator::TemplateEvaluator;
use super::super::iteration::length;
use super::super::markup::escape_value;
use super::super::methods::text_case;
use super::super::methods::text_classes::is_alphanumeric;
use super::super::methods::text_split::split_lines;
use super::super::methods::{PaddedWidth, PaddingSide, pad_value, replaced, strip_value};
use super::super::python_text::is_space;
use super::super::value::JinjaValue;
use super::FilterFunction;

/// Returns the filter `name`.
pub(super) fn find(name: &str) -> Option<FilterFunction> {
    Some(match name {
        "upper" => {
            |evaluator, value, arguments| case(evaluator, value, arguments, text_case::upper)
        }
        "lower" => {
            |evaluator, value, arguments| case(evaluator, value, arguments, text_case::lower)
        }
        "capitalize" => {
            |evaluator, value, arguments| case(evaluator, value, arguments, text_case::capitalize)
        }
        "title" => |evaluator, value, arguments| {
            // Jinja2's filter `title` returns a plain string even for a `Markup` string.
            let text = case(evaluator, value, arguments, title)?;
            Ok(JinjaValue::Str(evaluator.str_of(&text)?))
        },
        "string" => |evaluator, value, arguments| {
            arguments.expect_none("string")?;
            soft_str(evaluator, value)
        },
        "trim" => |evaluator, value, arguments| {
            let [characters] = arguments.bind("trim", ["chars"], 0)?;
            let text = soft_str(evaluator, value)?;
            strip_value(evaluator, &text, given(characters).as_ref(), [true, true])
        },
        "replace" => |evaluator, value, arguments| {
            let [old, new, count] = arguments.bind("replace", ["old", "new", "count"], 2)?;
            let text = evaluator.str_of(value)?;
            let old = evaluator.str_of(&old.unwrap_or(JinjaValue::None))?;
            let new = evaluator.str_of(&new.unwrap_or(JinjaValue::None))?;
            let count = integer_or(given(count).as_ref(), -1)?;
            Ok(JinjaValue::text(replaced(evaluator, &text, [&old, &new], count)?))
        },
        "center" => |evaluator, value, arguments| {
            let [width] = arguments.bind("center", ["width"], 0)?;
            let width = integer_or(width.as_ref(), 80)?;
            let text = soft_str(evaluator, value)?;
            pad_value(evaluator, &text, PaddedWidth { width, fill: ' ' }, PaddingSide::Both)
        },
        "format" => format,
        "indent" => indent,
        "truncate" => truncate,
        "wordcount" => |evaluator, value, arguments| {
            arguments.expect_none("wordcount")?;
            let text = evaluator.str_of(value)?;
            evaluator.spend_bytes(text.len())?;
            let words = text.split(|c: char| c != '_' && !is_alphanumeric(c));
            Ok(JinjaValue::Int(words.filter(|word| !word.is_empty()).count() as i64))
        },
        "wordwrap" => super::word_wrap::word_wrap,
        _ => return None,
    })
}

/// Converts a value to a string; a `Markup` string stays a `Markup` string.
pub(super) fn soft_str(
    evaluator: &mut TemplateEvaluator,
    value: &JinjaValue,
) -> JinjaResult<JinjaValue> {
    match value {
        JinjaValue::Str(_) | JinjaValue::Markup(_) => Ok(value.clone()),
        _ => Ok(JinjaValue::Str(evaluator.str_of(value)?)),
    }
}

fn case(
    evaluator: &mut TemplateEvaluator,
    value: &JinjaValue,
    arguments: CallArguments,
    mapping: fn(&str) -> String,
) -> JinjaResult<JinjaValue> {
    arguments.expect_none("filter")?;
    let text = soft_str(evaluator, value)?;
    let characters = text.as_str().unwrap_or_default();
    evaluator.spend_bytes(characters.len())?;
    evaluator.charge(characters.len() * 3)?;
    let mapped = mapping(characters);
    Ok(JinjaValue::text_like(&text, mapped))
}

/// Returns `text` with the first character of each word in upper case and the others in lower case. A word
/// begins after white space, a hyphen or an opening bracket.
fn title(text: &str) -> String {
    let is_separator = |c: char| is_space(c) || matches!(c, '-' | '(' | '{' | '[' | '<');
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while !rest.is_empty() {
        let separators = rest.len() - rest.trim_start_matches(is_separator).len();
        let length =
            if separators > 0 { separators } else { rest.find(is_separator).unwrap_or(rest.len()) };
        let (part, after) = rest.split_at(length);
        let first = part.chars().next().map_or(0, char::len_utf8);
        out.push_str(&part[..first].to_uppercase());
        out.push_str(&part[first..].to_lowercase());
        rest = after;
    }
    out
}

fn format(
    evaluator: &mut TemplateEvaluator,
    value: &JinjaValue,
    arguments: CallArguments,
) -> JinjaResult<JinjaValue> {
    let CallArguments { positional, keyword } = arguments;
    let values = if keyword.is_empty() {
        JinjaValue::tuple(positional)?
    } else if positional.is_empty() {
        let mut named = super::super::dict::DictValue::default();
        for argument in keyword {
            named.insert(JinjaValue::Str(argument.name), argument.value)?;
        }
        JinjaValue::dict(named)
    } else {
        let message = "can't handle positional and keyword arguments at the same time";
        return Err(JinjaError::runtime(message));
    };
    let text = soft_str(evaluator, value)?;
    let is_markup = matches!(text, JinjaValue::Markup(_));
    let format = text_argument("format", &text)?;
    super::super::percent_format::percent_format(evaluator, &format, is_markup, &values)
}

/// Returns the text before each indented line; `width` is the text itself or its number of spaces.
fn indention(evaluator: &mut TemplateEvaluator, width: Option<&JinjaValue>) -> JinjaResult<String> {
    Ok(match width {
        None => "    ".to_owned(),
        Some(JinjaValue::Str(text) | JinjaValue::Markup(text)) => text.to_string(),
        Some(width) => {
            let count = usize::try_from(integer_argument(width)?).unwrap_or(0);
            evaluator.charge(count)?;
            " ".repeat(count)
        }
    })
}

fn indent(
    evaluator: &mut TemplateEvaluator,
    value: &JinjaValue,
    arguments: CallArguments,
) -> JinjaResult<JinjaValue> {
    let [width, first, blank] = arguments.bind("indent", ["width", "first", "blank"], 0)?;
    let text = text_argument("indent", value)?;
    let indention = indention(evaluator, width.as_ref())?;
    let is_blank_indented = flag(blank.as_ref(), false);
    let text = format!("{text}\n");
    let lines = split_lines(&text, false);
    evaluator.charge(text.len().saturating_add(lines.len().saturating_mul(indention.len())))?;
    evaluator.spend_bytes(text.len())?;
    let mut out = String::new();
    if flag(first.as_ref(), false) {
        out.push_str(&indention);
    }
    for (index, line) in lines.iter().enumerate() {
        if index > 0 {
            out.push('\n');
            if is_blank_indented || !line.is_empty() {
                out.push_str(&indention);
            }
        }
        out.push_str(line);
    }
    Ok(JinjaValue::text_like(value, out))
}

fn truncate(
    evaluator: &mut TemplateEvaluator,
    value: &JinjaValue,
    arguments: CallArguments,
) -> JinjaResult<JinjaValue> {
    let names = ["length", "killwords", "end", "leeway"];
    let [limit, kill_words, end, leeway] = arguments.bind("truncate", names, 0)?;
    let limit = integer_or(limit.as_ref(), 255)?;
    let leeway = integer_or(given(leeway).as_ref(), 5)?;
    let end = end.unwrap_or_else(|| JinjaValue::text("..."));
    let end_length = text_argument("truncate", &end)?.chars().count() as i64;
    if limit < end_length {
        let message = format!("expected length >= {end_length}, got {limit}");
        return Err(JinjaError::runtime(message));
    }
    if leeway < 0 {
        return Err(JinjaError::runtime(format!("expected leeway >= 0, got {leeway}")));
    }
    let Some(actual) = length(value) else {
        let kind = value.type_name();
        return Err(JinjaError::type_error(format!("object of type '{kind}' has no len()")));
    };
    if actual as i64 <= limit.saturating_add(leeway) {
        return Ok(value.clone());
    }
    let text = text_argument("truncate", value)?;
    evaluator.charge(text.len())?;
    let mut kept: String = text.chars().take((limit - end_length) as usize).collect();
    if !flag(kill_words.as_ref(), false)
        && let Some(space) = kept.rfind(' ')
    {
        kept.truncate(space);
    }
    let is_markup = matches!(value, JinjaValue::Markup(_));
    let end = if is_markup { escape_value(evaluator, &end)? } else { evaluator.str_of(&end)? };
    Ok(JinjaValue::text_like(value, kept + &end))
}
