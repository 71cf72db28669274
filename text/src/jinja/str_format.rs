//! `str.format` and `str.format_map` with the semantics of Jinja2's sandbox: fields look up attributes and
//! elements by the rules of templates.

use super::arguments::CallArguments;
use super::error::{JinjaError, JinjaErrorKind, JinjaResult};
use super::evaluator::TemplateEvaluator;
use super::format_spec::format_value;
use super::markup::escape;
use super::percent_format::ascii;
use super::value::JinjaValue;
use std::sync::Arc;

/// Formats a string with `str.format`. If `is_markup`, the inserted texts are HTML-escaped.
///
/// Errors: the arguments do not fit the string, or a limit is exceeded.
pub(crate) fn str_format(
    evaluator: &mut TemplateEvaluator,
    format: &str,
    is_markup: bool,
    arguments: &CallArguments,
) -> JinjaResult<JinjaValue> {
    let mut formatter = FieldFormatter { arguments, numbering: FieldNumbering::Unknown, is_markup };
    let text = formatter.format(evaluator, format, 3)?;
    Ok(if is_markup { JinjaValue::Markup(text.into()) } else { JinjaValue::text(text) })
}

/// How the fields of a format string are numbered.
#[derive(Clone, Copy, PartialEq, Eq)]
enum FieldNumbering {
    Unknown,
    /// `{}`: the number of fields so far.
    Automatic(usize),
    /// `{0}`
    Manual,
}

/// Formatter of strings for `str.format`; replaces fields by arguments.
struct FieldFormatter<'a> {
    arguments: &'a CallArguments,
    numbering: FieldNumbering,
    is_markup: bool,
}

impl FieldFormatter<'_> {
    /// Formats a string; fields may be nested up to depth `depth`.
    fn format(
        &mut self,
        evaluator: &mut TemplateEvaluator,
        format: &str,
        depth: usize,
    ) -> JinjaResult<String> {
        if depth == 0 {
            return Err(JinjaError::value_error("Max string recursion exceeded"));
        }
        let mut out = String::new();
        let mut rest = format;
        while let Some(at) = rest.find(['{', '}']) {
            out.push_str(&rest[..at]);
            let bracket = &rest[at..=at];
            rest = &rest[at + 1..];
            if let Some(after) = rest.strip_prefix(bracket) {
                out.push_str(bracket);
                rest = after;
                continue;
            }
            if bracket == "}" {
                return Err(JinjaError::value_error("Single '}' encountered in format string"));
            }
            let end = field_end(rest)?;
            let before = out.len();
            self.field(evaluator, &rest[..end], depth, &mut out)?;
            evaluator.charge(out.len() - before)?;
            rest = &rest[end + 1..];
        }
        out.push_str(rest);
        evaluator.charge(format.len())?;
        Ok(out)
    }

    /// Appends the value of a field such as `name.attribute!r:>8`.
    fn field(
        &mut self,
        evaluator: &mut TemplateEvaluator,
        field: &str,
        depth: usize,
        out: &mut String,
    ) -> JinjaResult<()> {
        let parts = FieldParts::of(field)?;
        let value = self.value(evaluator, parts.name)?;
        let value = converted(evaluator, value, parts.conversion)?;
        let spec = self.format(evaluator, parts.spec, depth - 1)?;
        if self.is_markup {
            if let JinjaValue::Markup(text) = &value {
                if !spec.is_empty() {
                    let message = "Unsupported format specification for Markup.";
                    return Err(JinjaError::value_error(message));
                }
                out.push_str(text);
            } else {
                out.push_str(&escape(&format_value(evaluator, &value, &spec)?));
            }
            return Ok(());
        }
        out.push_str(&format_value(evaluator, &value, &spec)?);
        Ok(())
    }

    /// Returns the value of a field name such as `0.name[key]`.
    fn value(&mut self, evaluator: &mut TemplateEvaluator, name: &str) -> JinjaResult<JinjaValue> {
        let first = name.find(['.', '[']).unwrap_or(name.len());
        let mut value = self.argument(&name[..first])?;
        let mut rest = &name[first..];
        while !rest.is_empty() {
            if let Some(attribute) = rest.strip_prefix('.') {
                let end = attribute.find(['.', '[']).unwrap_or(attribute.len());
                if end == 0 {
                    return Err(JinjaError::value_error("Empty attribute in format string"));
                }
                value = evaluator.attribute(&value, &Arc::from(&attribute[..end]))?;
                rest = &attribute[end..];
            } else if let Some(index) = rest.strip_prefix('[') {
                let end = index.find(']').filter(|end| *end > 0);
                let end =
                    end.ok_or_else(|| JinjaError::value_error("Missing ']' in format string"))?;
                value = evaluator.item(&value, &index_value(&index[..end]))?;
                rest = &index[end + 1..];
            } else {
                let message = "Only '.' or '[' may follow ']' in format field specifier";
                return Err(JinjaError::value_error(message));
            }
        }
        Ok(value)
    }

    fn argument(&mut self, name: &str) -> JinjaResult<JinjaValue> {
        let index = if name.is_empty() {
            let index = match self.numbering {
                FieldNumbering::Automatic(count) => count,
                FieldNumbering::Unknown => 0,
                FieldNumbering::Manual => return Err(mixed_numbering()),
            };
            self.numbering = FieldNumbering::Automatic(index + 1);
            Some(index)
        } else if name.bytes().all(|byte| byte.is_ascii_digit()) {
            if matches!(self.numbering, FieldNumbering::Automatic(_)) {
                return Err(mixed_numbering());
            }
            self.numbering = FieldNumbering::Manual;
            Some(name.parse().unwrap_or(usize::MAX))
        } else {
            None
        };
        let found = if let Some(index) = index {
            self.arguments.positional.get(index)
        } else {
            let mut keyword = self.arguments.keyword.iter();
            keyword.find(|argument| &*argument.name == name).map(|argument| &argument.value)
        };
        found.cloned().ok_or_else(|| {
            let message = format!("no argument for the field '{name}' of the format string");
            JinjaError::new(JinjaErrorKind::Lookup, message)
        })
    }
}

fn mixed_numbering() -> JinjaError {
    JinjaError::value_error("cannot mix manual field specification and automatic field numbering")
}

/// Returns the value of an index between brackets: an integer if the index consists of digits, otherwise a
/// string.
fn index_value(index: &str) -> JinjaValue {
    match index.parse::<i64>() {
        Ok(number) if index.bytes().all(|byte| byte.is_ascii_digit()) => JinjaValue::Int(number),
        _ => JinjaValue::text(index),
    }
}

/// Returns the position of the bracket that closes a field.
fn field_end(text: &str) -> JinjaResult<usize> {
    let mut depth = 1;
    for (at, c) in text.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Ok(at);
        }
    }
    Err(JinjaError::value_error("expected '}' before end of string"))
}

/// Applies the conversion of a replacement field to its value.
fn converted(
    evaluator: &mut TemplateEvaluator,
    value: JinjaValue,
    conversion: Option<char>,
) -> JinjaResult<JinjaValue> {
    Ok(match conversion {
        None => value,
        Some('s') => JinjaValue::Str(evaluator.str_of(&value)?),
        Some('r') => JinjaValue::text(evaluator.repr_of(&value)?),
        Some('a') => JinjaValue::text(ascii(&evaluator.repr_of(&value)?)),
        Some(other) => {
            let message = format!("Unknown conversion specifier {other}");
            return Err(JinjaError::value_error(message));
        }
    })
}

/// Name, conversion and format specification of a replacement field of `str.format`.
struct FieldParts<'a> {
    name: &'a str,
    conversion: Option<char>,
    spec: &'a str,
}

/// Returns the end of the name of a replacement field: the first `!` or `:` outside an index.
fn name_end(field: &str) -> usize {
    let mut in_index = false;
    let end = field.find(|c| {
        match c {
            '[' => in_index = true,
            ']' => in_index = false,
            '!' | ':' => return !in_index,
            _ => {}
        }
        false
    });
    end.unwrap_or(field.len())
}

impl<'a> FieldParts<'a> {
    fn of(field: &'a str) -> JinjaResult<Self> {
        let (name, rest) = field.split_at(name_end(field));
        if name.contains('{') {
            return Err(JinjaError::value_error("unexpected '{' in field name"));
        }
        let Some(conversion) = rest.strip_prefix('!') else {
            return Ok(Self {
                name,
                conversion: None,
                spec: rest.strip_prefix(':').unwrap_or(rest),
            });
        };
        let mut chars = conversion.chars();
        let kind = chars.next();
        if kind.is_none() {
            let message = "unmatched '{' in format spec";
            return Err(JinjaError::value_error(message));
        }
        let rest = chars.as_str();
        let invalid = || JinjaError::value_error("expected ':' after conversion specifier");
        let spec =
            if rest.is_empty() { rest } else { rest.strip_prefix(':').ok_or_else(invalid)? };
        Ok(Self { name, conversion: kind, spec })
    }
}
