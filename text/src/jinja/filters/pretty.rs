//! The filter `pprint`: Python's `pprint.pformat` with lines of 80 characters.

use super::super::arguments::CallArguments;
use super::super::dict::DictEntry;
use super::super::error::JinjaResult;
use super::super::evaluator::TemplateEvaluator;
use super::super::methods::text_split::split_lines;
use super::super::python_text::{is_space, quote};
use super::super::value::JinjaValue;
use super::sort_filters::{ValueWithSortKey, stable_sort};

/// Maximum length of a line in characters.
const WIDTH: usize = 80;

/// Implements the filter `pprint`.
///
/// Errors: the text of a value varies between runs of Python, or a limit is exceeded.
pub(super) fn pretty_print(
    evaluator: &mut TemplateEvaluator,
    value: &JinjaValue,
    arguments: CallArguments,
) -> JinjaResult<JinjaValue> {
    arguments.expect_none("pprint")?;
    let mut out = String::new();
    let place = PrintPosition { indent: 0, allowance: 0, level: 0 };
    write_pretty(evaluator, value, place, &mut out)?;
    Ok(JinjaValue::text(out))
}

/// Position in the output at which a value is written.
#[derive(Clone, Copy)]
struct PrintPosition {
    /// Column of the value.
    indent: usize,
    /// Number of characters that follow the value on the same line.
    allowance: usize,
    /// Nesting of the value.
    level: usize,
}

/// Returns a value on one line, with the entries of each dict sorted.
fn one_line(evaluator: &mut TemplateEvaluator, value: &JinjaValue) -> JinjaResult<String> {
    let sorted = evaluator.nested(|evaluator| sorted_dicts(evaluator, value))?;
    evaluator.repr_of(&sorted)
}

fn sorted_dicts(evaluator: &mut TemplateEvaluator, value: &JinjaValue) -> JinjaResult<JinjaValue> {
    evaluator.spend(1)?;
    match value {
        JinjaValue::List(items) | JinjaValue::Tuple(items) => {
            let mut sorted = Vec::new();
            evaluator.charge(items.items.len() * size_of::<JinjaValue>())?;
            for item in &items.items {
                sorted.push(sorted_dicts(evaluator, item)?);
            }
            let is_list = matches!(value, JinjaValue::List(_));
            if is_list { JinjaValue::list(sorted) } else { JinjaValue::tuple(sorted) }
        }
        JinjaValue::Dict(dict) => {
            let mut sorted = super::super::dict::DictValue::default();
            for entry in sorted_entries(evaluator, dict.entries())? {
                evaluator.charge(64)?;
                let value = sorted_dicts(evaluator, &entry.value)?;
                sorted.insert(entry.key, value)?;
            }
            Ok(JinjaValue::dict(sorted))
        }
        _ => Ok(value.clone()),
    }
}

fn sorted_entries(
    evaluator: &mut TemplateEvaluator,
    entries: &[DictEntry],
) -> JinjaResult<Vec<ValueWithSortKey>> {
    let entries = entries.iter();
    let entries = entries
        .map(|entry| ValueWithSortKey { key: entry.key.clone(), value: entry.value.clone() });
    stable_sort(evaluator, entries.collect(), false)
}

fn write_pretty(
    evaluator: &mut TemplateEvaluator,
    value: &JinjaValue,
    place: PrintPosition,
    out: &mut String,
) -> JinjaResult<()> {
    let line = one_line(evaluator, value)?;
    let width = WIDTH.saturating_sub(place.indent + place.allowance);
    if line.chars().count() <= width {
        out.push_str(&line);
        return Ok(());
    }
    evaluator.nested(|evaluator| match value {
        JinjaValue::List(items) => {
            out.push('[');
            write_items(evaluator, &items.items, place, "]", out)
        }
        JinjaValue::Tuple(items) => {
            out.push('(');
            let end = if items.items.len() == 1 { ",)" } else { ")" };
            write_items(evaluator, &items.items, place, end, out)
        }
        JinjaValue::Dict(dict) => write_dict(evaluator, dict.entries(), place, out),
        JinjaValue::Str(text) => write_text(evaluator, text, place, out),
        _ => {
            out.push_str(&line);
            Ok(())
        }
    })
}

fn new_line(indent: usize, out: &mut String) {
    out.push('\n');
    out.extend(std::iter::repeat_n(' ', indent));
}

fn write_items(
    evaluator: &mut TemplateEvaluator,
    items: &[JinjaValue],
    place: PrintPosition,
    end: &str,
    out: &mut String,
) -> JinjaResult<()> {
    let indent = place.indent + 1;
    for (index, item) in items.iter().enumerate() {
        if index > 0 {
            out.push(',');
            new_line(indent, out);
        }
        let is_last = index + 1 == items.len();
        let allowance = if is_last { place.allowance + end.len() } else { 1 };
        let inner = PrintPosition { indent, allowance, level: place.level + 1 };
        write_pretty(evaluator, item, inner, out)?;
    }
    out.push_str(end);
    Ok(())
}

fn write_dict(
    evaluator: &mut TemplateEvaluator,
    entries: &[DictEntry],
    place: PrintPosition,
    out: &mut String,
) -> JinjaResult<()> {
    out.push('{');
    let count = entries.len();
    for (index, entry) in sorted_entries(evaluator, entries)?.iter().enumerate() {
        if index > 0 {
            out.push(',');
            new_line(place.indent + 1, out);
        }
        let key = one_line(evaluator, &entry.key)?;
        out.push_str(&key);
        out.push_str(": ");
        let indent = place.indent + 1 + key.chars().count() + 2;
        let allowance = if index + 1 == count { place.allowance + 1 } else { 1 };
        let inner = PrintPosition { indent, allowance, level: place.level + 1 };
        write_pretty(evaluator, &entry.value, inner, out)?;
    }
    out.push('}');
    Ok(())
}

/// Writes a long string as several string literals on separate lines, which Python concatenates.
fn write_text(
    evaluator: &mut TemplateEvaluator,
    text: &str,
    place: PrintPosition,
    out: &mut String,
) -> JinjaResult<()> {
    let is_top = place.level == 0;
    let indent = place.indent + usize::from(is_top);
    let allowance = place.allowance + usize::from(is_top);
    let width = WIDTH.saturating_sub(indent);
    let lines = split_lines(text, true);
    let mut chunks = Vec::new();
    for (index, line) in lines.iter().enumerate() {
        let reserved = if index + 1 == lines.len() { allowance } else { 0 };
        let quoted = quote(line);
        evaluator.charge(quoted.len())?;
        if quoted.chars().count() <= width.saturating_sub(reserved) {
            chunks.push(quoted);
        } else {
            split_line(evaluator, line, [width, reserved], &mut chunks)?;
        }
    }
    let in_parentheses = is_top && chunks.len() > 1;
    if in_parentheses {
        out.push('(');
    }
    for (index, chunk) in chunks.iter().enumerate() {
        if index > 0 {
            new_line(indent, out);
        }
        out.push_str(chunk);
    }
    if in_parentheses {
        out.push(')');
    }
    Ok(())
}

/// Splits a line at white space and appends the parts to `chunks` as string literals of at most `widths[0]`
/// characters; the last literal has at most `widths[0] - widths[1]` characters. A single longer word is not
/// split.
fn split_line(
    evaluator: &mut TemplateEvaluator,
    line: &str,
    widths: [usize; 2],
    chunks: &mut Vec<String>,
) -> JinjaResult<()> {
    let mut current = String::new();
    let mut rest = line;
    while !rest.is_empty() {
        let word = rest.find(is_space).unwrap_or(rest.len());
        let spaces = rest[word..].len() - rest[word..].trim_start_matches(is_space).len();
        let (part, after) = rest.split_at(word + spaces);
        rest = after;
        let width = if rest.is_empty() { widths[0].saturating_sub(widths[1]) } else { widths[0] };
        let candidate = format!("{current}{part}");
        evaluator.charge(candidate.len())?;
        if quote(&candidate).chars().count() <= width {
            current = candidate;
            continue;
        }
        if !current.is_empty() {
            chunks.push(quote(&current));
        }
        part.clone_into(&mut current);
    }
    if !current.is_empty() {
        chunks.push(quote(&current));
    }
    Ok(())
}
