//! Methods that strip, pad, encode and format strings, and methods that change their case.

use super::super::arguments::{CallArguments, given, integer_argument, integer_or, text_argument};
use super::super::error::{JinjaError, JinjaResult};
use super::super::evaluator::TemplateEvaluator;
use super::super::filters::strip_tags;
use super::super::markup::escape_value;
use super::super::python_text::is_space;
use super::super::str_format::str_format;
use super::super::value::JinjaValue;
use super::{MethodFunction, text_case};
use std::rc::Rc;

/// Returns the method `name`.
pub(super) fn find(name: &str) -> Option<MethodFunction> {
    macro_rules! mapping {
        ($mapping:path) => {
            |evaluator, value, arguments| {
                arguments.expect_none("str method")?;
                mapped(evaluator, value, $mapping)
            }
        };
    }
    Some(match name {
        "strip" => |evaluator, value, arguments| strip(evaluator, value, arguments, [true, true]),
        "lstrip" => |evaluator, value, arguments| strip(evaluator, value, arguments, [true, false]),
        "rstrip" => |evaluator, value, arguments| strip(evaluator, value, arguments, [false, true]),
        "upper" => mapping!(text_case::upper),
        "lower" => mapping!(text_case::lower),
        "title" => mapping!(text_case::title),
        "capitalize" => mapping!(text_case::capitalize),
        "swapcase" => mapping!(text_case::swapcase),
        "casefold" => mapping!(text_case::casefold),
        "center" => {
            |evaluator, value, arguments| pad(evaluator, value, arguments, PaddingSide::Both)
        }
        "ljust" => {
            |evaluator, value, arguments| pad(evaluator, value, arguments, PaddingSide::Right)
        }
        "rjust" => {
            |evaluator, value, arguments| pad(evaluator, value, arguments, PaddingSide::Left)
        }
        "zfill" => zfill,
        "expandtabs" => expand_tabs,
        "encode" => |evaluator, value, arguments| {
            let [encoding, errors] = arguments.bind("encode", ["encoding", "errors"], 0)?;
            let is_utf8 = match given(encoding) {
                None => true,
                Some(encoding) => {
                    let name = text_argument("encode", &encoding)?.to_lowercase();
                    matches!(name.as_str(), "utf-8" | "utf8" | "utf_8")
                }
            };
            if !is_utf8 || errors.is_some() {
                return Err(JinjaError::unsupported("encode() supports UTF-8 only"));
            }
            let text = value.as_str().unwrap_or_default();
            evaluator.charge(text.len())?;
            Ok(JinjaValue::Bytes(Rc::from(text.as_bytes())))
        },
        "format" => |evaluator, value, arguments| {
            let text = text_argument("format", value)?;
            str_format(evaluator, &text, matches!(value, JinjaValue::Markup(_)), &arguments)
        },
        "format_map" => |evaluator, value, arguments| {
            let [mapping] = arguments.bind_positional("format_map", 1)?;
            let mut arguments = CallArguments::default();
            arguments.spread_keyword(&mapping.unwrap_or(JinjaValue::None))?;
            let text = text_argument("format_map", value)?;
            str_format(evaluator, &text, matches!(value, JinjaValue::Markup(_)), &arguments)
        },
        "translate" | "maketrans" => {
            |_, _, _| Err(JinjaError::unsupported("translation tables of strings are unsupported"))
        }
        _ => return None,
    })
}

/// Returns the method `name` of `Markup` strings.
pub(super) fn find_markup(value: &JinjaValue, name: &str) -> Option<MethodFunction> {
    if !matches!(value, JinjaValue::Markup(_)) {
        return None;
    }
    Some(match name {
        "striptags" => |evaluator, value, arguments| {
            arguments.expect_none("striptags")?;
            strip_tags(evaluator, value.as_str().unwrap_or_default())
        },
        "escape" => |evaluator, _, arguments| {
            let [value] = arguments.bind_positional("escape", 1)?;
            Ok(JinjaValue::Markup(escape_value(evaluator, &value.unwrap_or(JinjaValue::None))?))
        },
        _ => return None,
    })
}

/// Returns the method `name` of bytes.
pub(super) fn find_bytes(name: &str) -> Option<MethodFunction> {
    Some(match name {
        "decode" => |evaluator, value, arguments| {
            let [encoding] = arguments.bind("decode", ["encoding"], 0)?;
            if let Some(encoding) = encoding {
                let name = text_argument("decode", &encoding)?.to_lowercase();
                if !matches!(name.as_str(), "utf-8" | "utf8" | "utf_8") {
                    return Err(JinjaError::unsupported("decode() supports UTF-8 only"));
                }
            }
            let JinjaValue::Bytes(bytes) = value else { return Ok(JinjaValue::None) };
            evaluator.charge(bytes.len())?;
            let text = std::str::from_utf8(bytes);
            let text = text.map_err(|_| JinjaError::value_error("invalid UTF-8"))?;
            Ok(JinjaValue::text(text))
        },
        "hex" => |evaluator, value, arguments| {
            arguments.expect_none("hex")?;
            let JinjaValue::Bytes(bytes) = value else { return Ok(JinjaValue::None) };
            evaluator.charge(bytes.len() * 2)?;
            let digits = bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]);
            let digits: String =
                digits.filter_map(|digit| char::from_digit(u32::from(digit), 16)).collect();
            Ok(JinjaValue::text(digits))
        },
        _ => return None,
    })
}

fn mapped(
    evaluator: &mut TemplateEvaluator,
    value: &JinjaValue,
    mapping: fn(&str) -> String,
) -> JinjaResult<JinjaValue> {
    let text = value.as_str().unwrap_or_default();
    evaluator.spend_bytes(text.len())?;
    // A case mapping takes at most three times the bytes of the original character.
    evaluator.charge(text.len() * 3)?;
    Ok(JinjaValue::text_like(value, mapping(text)))
}

fn strip(
    evaluator: &mut TemplateEvaluator,
    value: &JinjaValue,
    arguments: CallArguments,
    ends: [bool; 2],
) -> JinjaResult<JinjaValue> {
    let [characters] = arguments.bind_positional("strip", 0)?;
    strip_value(evaluator, value, given(characters).as_ref(), ends)
}

/// Removes the given characters, or white space, from the start and the end of a string.
///
/// Errors: the argument is not a string, or a limit is exceeded.
pub(crate) fn strip_value(
    evaluator: &mut TemplateEvaluator,
    value: &JinjaValue,
    characters: Option<&JinjaValue>,
    ends: [bool; 2],
) -> JinjaResult<JinjaValue> {
    let characters = characters.map(|value| text_argument("strip", value)).transpose()?;
    if let Some(characters) = &characters {
        evaluator
            .spend_bytes(characters.len().saturating_mul(value.as_str().map_or(0, str::len)))?;
    }
    let is_stripped = |c: char| match &characters {
        Some(characters) => characters.contains(c),
        None => is_space(c),
    };
    let mut text = value.as_str().unwrap_or_default();
    if ends[0] {
        text = text.trim_start_matches(is_stripped);
    }
    if ends[1] {
        text = text.trim_end_matches(is_stripped);
    }
    if text.len() == value.as_str().map_or(0, str::len) {
        return Ok(value.clone());
    }
    evaluator.charge(text.len())?;
    evaluator.spend_bytes(text.len())?;
    Ok(JinjaValue::text_like(value, text))
}

/// Side on which a string is padded.
#[derive(Clone, Copy)]
pub(crate) enum PaddingSide {
    /// At the start.
    Left,
    /// At the end.
    Right,
    /// At both ends.
    Both,
}

fn pad(
    evaluator: &mut TemplateEvaluator,
    value: &JinjaValue,
    arguments: CallArguments,
    padding: PaddingSide,
) -> JinjaResult<JinjaValue> {
    let [width, fill] = arguments.bind_positional("padding", 1)?;
    let width = integer_argument(&width.unwrap_or(JinjaValue::None))?;
    let fill = match &fill {
        None => ' ',
        Some(fill) => {
            let fill = match value {
                JinjaValue::Markup(_) => escape_value(evaluator, fill)?,
                _ => text_argument("padding", fill)?,
            };
            let mut chars = fill.chars();
            chars.next().filter(|_| chars.next().is_none()).ok_or_else(|| {
                JinjaError::type_error("The fill character must be exactly one character long")
            })?
        }
    };
    pad_value(evaluator, value, PaddedWidth { width, fill }, padding)
}

/// Width of a padded string, and the fill character.
#[derive(Clone, Copy)]
pub(crate) struct PaddedWidth {
    /// Minimum number of characters.
    pub(crate) width: i64,
    /// Fill character.
    pub(crate) fill: char,
}

/// Pads a string to a width.
///
/// Errors: a limit is exceeded.
pub(crate) fn pad_value(
    evaluator: &mut TemplateEvaluator,
    value: &JinjaValue,
    padded: PaddedWidth,
    padding: PaddingSide,
) -> JinjaResult<JinjaValue> {
    let text = value.as_str().unwrap_or_default();
    let width = usize::try_from(padded.width).unwrap_or(0);
    let missing = width.saturating_sub(text.chars().count());
    evaluator.charge(text.len().saturating_add(missing.saturating_mul(padded.fill.len_utf8())))?;
    let left = match padding {
        PaddingSide::Left => missing,
        PaddingSide::Right => 0,
        PaddingSide::Both => missing / 2 + (missing & width & 1),
    };
    let fill = |count: usize| std::iter::repeat_n(padded.fill, count);
    let text: String = fill(left).chain(text.chars()).chain(fill(missing - left)).collect();
    Ok(JinjaValue::text_like(value, text))
}

fn zfill(
    evaluator: &mut TemplateEvaluator,
    value: &JinjaValue,
    arguments: CallArguments,
) -> JinjaResult<JinjaValue> {
    let [width] = arguments.bind_positional("zfill", 1)?;
    let width = usize::try_from(integer_argument(&width.unwrap_or(JinjaValue::None))?).unwrap_or(0);
    let text = value.as_str().unwrap_or_default();
    let missing = width.saturating_sub(text.chars().count());
    evaluator.charge(text.len().saturating_add(missing))?;
    let sign = usize::from(text.starts_with(['+', '-']));
    let text = format!("{}{}{}", &text[..sign], "0".repeat(missing), &text[sign..]);
    Ok(JinjaValue::text_like(value, text))
}

fn expand_tabs(
    evaluator: &mut TemplateEvaluator,
    value: &JinjaValue,
    arguments: CallArguments,
) -> JinjaResult<JinjaValue> {
    let [size] = arguments.bind("expandtabs", ["tabsize"], 0)?;
    let size = usize::try_from(integer_or(size.as_ref(), 8)?).unwrap_or(0);
    let text = value.as_str().unwrap_or_default();
    let tabs = text.matches('\t').count();
    evaluator.charge(text.len().saturating_add(tabs.saturating_mul(size)))?;
    let mut out = String::with_capacity(text.len());
    let mut column = 0;
    for c in text.chars() {
        match c {
            '\t' if size == 0 => {}
            '\t' => {
                let spaces = size - column % size;
                out.extend(std::iter::repeat_n(' ', spaces));
                column += spaces;
            }
            c => {
                column = if matches!(c, '\n' | '\r') { 0 } else { column + 1 };
                out.push(c);
            }
        }
    }
    Ok(JinjaValue::text_like(value, out))
}
