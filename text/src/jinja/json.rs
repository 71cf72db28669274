//! The filter `tojson` as transformers defines it: Python's `json.dumps` with `ensure_ascii=False`.

use super::arguments::{CallArguments, flag, given, integer_argument};
use super::dict::{DictEntry, DictValue};
use super::error::{JinjaError, JinjaResult};
use super::evaluator::TemplateEvaluator;
use super::filters::{ValueWithSortKey, stable_sort};
use super::numbers::{big_text, float_text};
use super::value::JinjaValue;
use crate::special_token_guard::may_be_sentinel;
use std::fmt::Write as _;
use std::sync::Arc;

/// Implements the filter `tojson`.
///
/// Errors: a value has no JSON form, or a limit is exceeded.
pub(crate) fn to_json(
    evaluator: &mut TemplateEvaluator,
    value: &JinjaValue,
    arguments: CallArguments,
) -> JinjaResult<JinjaValue> {
    let names = ["ensure_ascii", "indent", "separators", "sort_keys"];
    let [ascii, indent, separators, sort_keys] = arguments.bind("tojson", names, 0)?;
    let indent = given(indent).map(|indent| indent_text(evaluator, &indent)).transpose()?;
    let [comma, colon] = match given(separators) {
        Some(separators) => separator_pair(evaluator, &separators)?,
        None => [Arc::from(if indent.is_some() { "," } else { ", " }), Arc::from(": ")],
    };
    let writer = JsonWriter {
        indent,
        comma,
        colon,
        sort_keys: flag(sort_keys.as_ref(), false),
        ascii: flag(ascii.as_ref(), false),
    };
    let mut out = String::new();
    writer.value(evaluator, value, 0, &mut out)?;
    evaluator.charge(out.len())?;
    Ok(JinjaValue::text(out))
}

/// Returns the text of one indentation level; `indent` is a string or a number of spaces.
fn indent_text(evaluator: &mut TemplateEvaluator, indent: &JinjaValue) -> JinjaResult<Arc<str>> {
    if let Some(text) = indent.as_text() {
        return Ok(Arc::clone(text));
    }
    let width = usize::try_from(integer_argument(indent)?).unwrap_or(0);
    evaluator.charge(width)?;
    Ok(Arc::from(" ".repeat(width)))
}

fn separator_pair(
    evaluator: &mut TemplateEvaluator,
    separators: &JinjaValue,
) -> JinjaResult<[Arc<str>; 2]> {
    let items = evaluator.collect(separators)?;
    match &items[..] {
        [comma, colon] => match (comma.as_text(), colon.as_text()) {
            (Some(comma), Some(colon)) => Ok([Arc::clone(comma), Arc::clone(colon)]),
            _ => Err(JinjaError::type_error("separators must be strings")),
        },
        _ => Err(JinjaError::value_error("separators must have two items")),
    }
}

/// Writer of JSON for the filter `tojson`, configured by the arguments of the filter.
struct JsonWriter {
    indent: Option<Arc<str>>,
    comma: Arc<str>,
    colon: Arc<str>,
    sort_keys: bool,
    ascii: bool,
}

impl JsonWriter {
    fn value(
        &self,
        evaluator: &mut TemplateEvaluator,
        value: &JinjaValue,
        depth: usize,
        out: &mut String,
    ) -> JinjaResult<()> {
        evaluator.spend(1)?;
        match value {
            JinjaValue::None => out.push_str("null"),
            JinjaValue::Bool(value) => out.push_str(if *value { "true" } else { "false" }),
            JinjaValue::Int(number) => {
                let _infallible = write!(out, "{number}");
            }
            JinjaValue::Big(number) => out.push_str(&big_text(number)?),
            JinjaValue::Float(number) => out.push_str(&json_float(*number)),
            JinjaValue::Str(text) | JinjaValue::Markup(text) => {
                evaluator.charge(text.len())?;
                self.string(text, out);
            }
            JinjaValue::List(items) | JinjaValue::Tuple(items) => {
                out.push('[');
                for (index, item) in items.items.iter().enumerate() {
                    self.separate(evaluator, index == 0, depth + 1, out)?;
                    evaluator.nested(|evaluator| self.value(evaluator, item, depth + 1, out))?;
                }
                self.close(items.items.is_empty(), depth, ']', out);
            }
            JinjaValue::Dict(dict) => self.dict(evaluator, dict, depth, out)?,
            _ => {
                let kind = value.type_name();
                let message = format!("Object of type {kind} is not JSON serializable");
                return Err(JinjaError::type_error(message));
            }
        }
        Ok(())
    }

    fn dict(
        &self,
        evaluator: &mut TemplateEvaluator,
        dict: &DictValue,
        depth: usize,
        out: &mut String,
    ) -> JinjaResult<()> {
        let entries = self.ordered_entries(evaluator, dict)?;
        out.push('{');
        for (index, entry) in entries.iter().enumerate() {
            self.separate(evaluator, index == 0, depth + 1, out)?;
            self.key(evaluator, &entry.key, out)?;
            out.push_str(&self.colon);
            evaluator.nested(|evaluator| self.value(evaluator, &entry.value, depth + 1, out))?;
        }
        self.close(entries.is_empty(), depth, '}', out);
        Ok(())
    }

    /// Returns the entries of a dict in the order in which they are written.
    fn ordered_entries<'a>(
        &self,
        evaluator: &mut TemplateEvaluator,
        dict: &'a DictValue,
    ) -> JinjaResult<Vec<&'a DictEntry>> {
        let entries = dict.entries();
        if !self.sort_keys {
            return Ok(entries.iter().collect());
        }
        let mut order = Vec::with_capacity(entries.len());
        for (index, entry) in entries.iter().enumerate() {
            let value = JinjaValue::Int(index as i64);
            order.push(ValueWithSortKey { key: entry.key.clone(), value });
        }
        let order = stable_sort(evaluator, order, false)?;
        let entry_of = |keyed: &ValueWithSortKey| match keyed.value {
            JinjaValue::Int(index) => entries.get(index as usize),
            _ => None,
        };
        Ok(order.iter().filter_map(entry_of).collect())
    }

    fn key(
        &self,
        evaluator: &mut TemplateEvaluator,
        key: &JinjaValue,
        out: &mut String,
    ) -> JinjaResult<()> {
        match key {
            JinjaValue::Str(text) | JinjaValue::Markup(text) => {
                evaluator.charge(text.len())?;
                self.string(text, out);
            }
            JinjaValue::None
            | JinjaValue::Bool(_)
            | JinjaValue::Int(_)
            | JinjaValue::Big(_)
            | JinjaValue::Float(_) => {
                out.push('"');
                self.value(evaluator, key, 0, out)?;
                out.push('"');
            }
            _ => {
                let kind = key.type_name();
                let message = format!("keys must be str, int, float, bool or None, not {kind}");
                return Err(JinjaError::type_error(message));
            }
        }
        Ok(())
    }

    /// Writes the separator (comma and line break) before an element at nesting depth `depth`.
    fn separate(
        &self,
        evaluator: &mut TemplateEvaluator,
        is_first: bool,
        depth: usize,
        out: &mut String,
    ) -> JinjaResult<()> {
        let indent = self.indent.as_ref().map_or(0, |indent| indent.len());
        evaluator.charge(self.comma.len() + self.colon.len() + indent * depth)?;
        if !is_first {
            out.push_str(&self.comma);
        }
        self.line(depth, out);
        Ok(())
    }

    fn close(&self, is_empty: bool, depth: usize, bracket: char, out: &mut String) {
        if !is_empty {
            self.line(depth, out);
        }
        out.push(bracket);
    }

    fn line(&self, depth: usize, out: &mut String) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(&**indent, depth));
        }
    }

    fn string(&self, text: &str, out: &mut String) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                ' '..='~' => out.push(c),
                c if c < ' ' || (self.ascii && !may_be_sentinel(c)) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let _infallible = write!(out, "\\u{unit:04x}");
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

fn json_float(number: f64) -> String {
    if number.is_nan() {
        return "NaN".to_owned();
    }
    if number.is_infinite() {
        return if number > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    float_text(number)
}
