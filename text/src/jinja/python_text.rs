//! Text of values in the formats of Python's `str` and `repr`.

use super::dict::DictViewKind;
use super::error::{JinjaError, JinjaResult};
use super::evaluator::TemplateEvaluator;
use super::numbers::{big_text, float_text};
use super::unicode::{UNPRINTABLE, is_in};
use super::value::{BuiltinFunction, JinjaValue, RangeValue};
use crate::special_token_guard::may_be_sentinel;
use std::fmt::Write as _;
use std::sync::Arc;

/// Whether Python counts `c` as white space.
pub(crate) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// Removes white space at both ends.
pub(crate) fn strip(text: &str) -> &str {
    text.trim_matches(is_space)
}

/// Whether `repr` writes `c` unchanged.
pub(crate) fn is_printable(c: char) -> bool {
    c.is_ascii_graphic() || c == ' ' || !is_in(UNPRINTABLE, c) || may_be_sentinel(c)
}

/// Writes a string in the format of `repr`.
pub(crate) fn quote(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    write_quoted(text, &mut out);
    out
}

fn write_quoted(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => {
                out.push('\\');
                out.push(c);
            }
            c if is_printable(c) => out.push(c),
            c => write_code(c, out),
        }
    }
    out.push(quote);
}

/// Writes the escape sequence of a character.
pub(crate) fn write_code(c: char, out: &mut String) {
    let _infallible = match c as u32 {
        code @ 0..=0xff => write!(out, "\\x{code:02x}"),
        code @ 0x100..=0xffff => write!(out, "\\u{code:04x}"),
        code => write!(out, "\\U{code:08x}"),
    };
}

fn write_bytes(bytes: &[u8], out: &mut String) {
    let has = |quote: u8| bytes.contains(&quote);
    let quote = if has(b'\'') && !has(b'"') { '"' } else { '\'' };
    out.push('b');
    out.push(quote);
    for &byte in bytes {
        match byte {
            b'\\' => out.push_str("\\\\"),
            b'\n' => out.push_str("\\n"),
            b'\r' => out.push_str("\\r"),
            b'\t' => out.push_str("\\t"),
            byte if byte as char == quote => {
                out.push('\\');
                out.push(quote);
            }
            0x20..=0x7e => out.push(byte as char),
            byte => {
                let _infallible = write!(out, "\\x{byte:02x}");
            }
        }
    }
    out.push(quote);
}

fn write_range(range: RangeValue, out: &mut String) {
    let RangeValue { start, stop, step } = range;
    let _infallible = match step {
        1 => write!(out, "range({start}, {stop})"),
        _ => write!(out, "range({start}, {stop}, {step})"),
    };
}

impl TemplateEvaluator {
    /// Appends a value in the format of `str`.
    ///
    /// Errors: the text of the value varies between runs of Python, or a limit is exceeded.
    pub(crate) fn write_str(&mut self, value: &JinjaValue, out: &mut String) -> JinjaResult<()> {
        match value {
            JinjaValue::Str(text) | JinjaValue::Markup(text) => out.push_str(text),
            JinjaValue::Undefined(_) => {}
            _ => self.write_repr(value, out)?,
        }
        Ok(())
    }

    /// Returns the text of a value in the format of `str`.
    ///
    /// Errors: the text of the value varies between runs of Python, or a limit is exceeded.
    pub(crate) fn str_of(&mut self, value: &JinjaValue) -> JinjaResult<Arc<str>> {
        if let Some(text) = value.as_text() {
            return Ok(Arc::clone(text));
        }
        let mut out = String::new();
        self.write_str(value, &mut out)?;
        self.charge(out.len())?;
        Ok(Arc::from(out))
    }

    /// Returns the text of a value in the format of `repr`.
    ///
    /// Errors: the text of the value varies between runs of Python, or a limit is exceeded.
    pub(crate) fn repr_of(&mut self, value: &JinjaValue) -> JinjaResult<String> {
        let mut out = String::new();
        self.write_repr(value, &mut out)?;
        self.charge(out.len())?;
        Ok(out)
    }

    /// Appends a value in the format of `repr`.
    ///
    /// Errors: the text of the value varies between runs of Python, or a limit is exceeded.
    pub(crate) fn write_repr(&mut self, value: &JinjaValue, out: &mut String) -> JinjaResult<()> {
        self.spend(1)?;
        match value {
            JinjaValue::Undefined(_) => out.push_str("Undefined"),
            JinjaValue::None => out.push_str("None"),
            JinjaValue::Bool(flag) => out.push_str(if *flag { "True" } else { "False" }),
            JinjaValue::Int(number) => {
                let _infallible = write!(out, "{number}");
            }
            JinjaValue::Big(number) => out.push_str(&big_text(number)?),
            JinjaValue::Float(number) => out.push_str(&float_text(*number)),
            JinjaValue::Str(text) => {
                self.charge(text.len())?;
                write_quoted(text, out);
            }
            JinjaValue::Markup(text) => {
                self.charge(text.len())?;
                out.push_str("Markup(");
                write_quoted(text, out);
                out.push(')');
            }
            JinjaValue::Bytes(bytes) => {
                self.charge(bytes.len())?;
                write_bytes(bytes, out);
            }
            JinjaValue::Range(range) => write_range(*range, out),
            _ => return self.nested(|evaluator| evaluator.write_container(value, out)),
        }
        Ok(())
    }

    fn write_container(&mut self, value: &JinjaValue, out: &mut String) -> JinjaResult<()> {
        match value {
            JinjaValue::List(items) => self.write_items(&items.items, ['[', ']'], out)?,
            JinjaValue::Tuple(items) => {
                self.write_items(&items.items, ['(', ')'], out)?;
                if items.items.len() == 1 {
                    out.insert(out.len() - 1, ',');
                }
            }
            JinjaValue::Dict(dict) => self.write_entries(dict, out)?,
            JinjaValue::View(view) => {
                out.push_str(view.type_name());
                out.push('(');
                let items = match view.kind {
                    DictViewKind::Keys | DictViewKind::Values | DictViewKind::Items => {
                        self.collect(value)?
                    }
                };
                self.write_items(&items, ['[', ']'], out)?;
                out.push(')');
            }
            JinjaValue::Namespace(namespace) => {
                let attributes = namespace.attributes.borrow().clone();
                out.push_str("<Namespace ");
                self.write_entries(&attributes, out)?;
                out.push('>');
            }
            JinjaValue::Macro(definition) => match &definition.node.name {
                Some(name) => {
                    let _infallible = write!(out, "<Macro {}>", quote(name));
                }
                None => out.push_str("<Macro anonymous>"),
            },
            JinjaValue::Loop(state) => {
                let length = state.length(self)?;
                let _infallible = write!(out, "<LoopContext {}/{length}>", state.index0() + 1);
            }
            JinjaValue::TemplateBlocks => out.push_str("<TemplateReference None>"),
            JinjaValue::Function(BuiltinFunction::Dict) => out.push_str("<class 'dict'>"),
            JinjaValue::Function(BuiltinFunction::Namespace) => {
                out.push_str("<class 'jinja2.utils.Namespace'>");
            }
            JinjaValue::Function(BuiltinFunction::Cycler) => {
                out.push_str("<class 'jinja2.utils.Cycler'>");
            }
            JinjaValue::Function(BuiltinFunction::Joiner) => {
                out.push_str("<class 'jinja2.utils.Joiner'>");
            }
            _ => {
                let kind = value.type_name();
                let message =
                    format!("the text of a '{kind}' object contains its address in memory");
                return Err(JinjaError::unsupported(message));
            }
        }
        Ok(())
    }

    fn write_items(
        &mut self,
        items: &[JinjaValue],
        brackets: [char; 2],
        out: &mut String,
    ) -> JinjaResult<()> {
        out.push(brackets[0]);
        for (index, item) in items.iter().enumerate() {
            if index > 0 {
                out.push_str(", ");
            }
            self.write_repr(item, out)?;
        }
        out.push(brackets[1]);
        Ok(())
    }

    fn write_entries(
        &mut self,
        dict: &super::dict::DictValue,
        out: &mut String,
    ) -> JinjaResult<()> {
        out.push('{');
        for (index, entry) in dict.entries().iter().enumerate() {
            if index > 0 {
                out.push_str(", ");
            }
            self.write_repr(&entry.key, out)?;
            out.push_str(": ");
            self.write_repr(&entry.value, out)?;
        }
        out.push('}');
        Ok(())
    }
}
