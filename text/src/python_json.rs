//! Writes JSON like Python's `json.dumps(ensure_ascii=False)`, as the `tojson` filter of chat templates must:
//! `", "` and `": "` as separators, no HTML escapes, key order preserved.

use std::fmt::Write as _;

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind};

use super::special_token_guard::may_be_sentinel;

/// Maximum nesting depth of containers; deeper values are an error (as in Python) instead of a stack
/// overflow.
const DEPTH_MAX: usize = 256;

/// Implements the `tojson` filter with `indent`, `separators`, `sort_keys` and `ensure_ascii`.
pub(super) fn tojson(value: &Value, kwargs: &Kwargs) -> Result<Value, Error> {
    let indent = kwargs.get::<Option<Value>>("indent")?.filter(|v| !v.is_none());
    let indent = match indent {
        Some(v) => Some(match v.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(usize::try_from(v)?.min(64)),
        }),
        None => None,
    };
    let separators = kwargs.get::<Option<Vec<String>>>("separators")?;
    let default = if indent.is_some() { "," } else { ", " };
    let (comma, colon) = match separators.as_deref() {
        Some([comma, colon]) => (comma.clone(), colon.clone()),
        _ => (default.to_owned(), ": ".to_owned()),
    };
    let writer = PythonJsonWriter {
        indent,
        comma,
        colon,
        sort_keys: kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        ascii: kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
    };
    kwargs.assert_all_used()?;
    let mut out = String::new();
    writer.value(value, 0, &mut out)?;
    Ok(Value::from_safe_string(out))
}

struct PythonJsonWriter {
    indent: Option<String>,
    comma: String,
    colon: String,
    sort_keys: bool,
    ascii: bool,
}

impl PythonJsonWriter {
    fn value(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        if depth > DEPTH_MAX {
            return Err(Error::new(ErrorKind::InvalidOperation, "tojson: nested too deeply"));
        }
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number if value.is_integer() => {
                let _infallible = write!(out, "{value}");
            }
            ValueKind::Number => out.push_str(&float(f64::try_from(value.clone())?)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default(), out),
            ValueKind::Seq | ValueKind::Iterable => self.sequence(value, depth, out)?,
            ValueKind::Map => self.map(value, depth, out)?,
            other => {
                let text = format!("tojson: a value of type {other} has no JSON form");
                return Err(Error::new(ErrorKind::InvalidOperation, text));
            }
        }
        Ok(())
    }

    fn sequence(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        out.push('[');
        let mut empty = true;
        for item in value.try_iter()? {
            self.separate(empty, depth + 1, out);
            empty = false;
            self.value(&item, depth + 1, out)?;
        }
        self.close(empty, depth, ']', out);
        Ok(())
    }

    fn map(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        let mut keys: Vec<Value> = value.try_iter()?.collect();
        if self.sort_keys {
            keys.sort();
        }
        out.push('{');
        let mut empty = true;
        for key in keys {
            self.separate(empty, depth + 1, out);
            empty = false;
            match key.as_str() {
                Some(text) => self.string(text, out),
                None => self.string(&key.to_string(), out),
            }
            out.push_str(&self.colon);
            self.value(&value.get_item(&key)?, depth + 1, out)?;
        }
        self.close(empty, depth, '}', out);
        Ok(())
    }

    /// Writes the separator (comma and line break) before an element at nesting depth `depth`.
    fn separate(&self, first: bool, depth: usize, out: &mut String) {
        if !first {
            out.push_str(&self.comma);
        }
        self.line(depth, out);
    }

    fn close(&self, empty: bool, depth: usize, bracket: char, out: &mut String) {
        if !empty {
            self.line(depth, out);
        }
        out.push(bracket);
    }

    fn line(&self, depth: usize, out: &mut String) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(indent.as_str(), depth));
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
                c if (c as u32) < 0x20 || (self.ascii && !c.is_ascii() && !may_be_sentinel(c)) => {
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

/// Formats a float like Python's `repr`: the shortest digits that round-trip, with an exponent for values
/// below 1e-4 and from 1e16.
fn float(x: f64) -> String {
    if x.is_nan() {
        return "NaN".to_owned();
    }
    if x.is_infinite() {
        return if x > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    if x == 0.0 || (1e-4..1e16).contains(&x.abs()) {
        let text = x.to_string();
        return if text.contains('.') { text } else { text + ".0" };
    }
    let text = format!("{x:e}");
    let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let (sign, digits) = exponent.strip_prefix('-').map_or(('+', exponent), |d| ('-', d));
    format!("{mantissa}e{sign}{digits:0>2}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_match_python_repr() {
        let cases = [
            (1.0, "1.0"),
            (-0.0, "-0.0"),
            (0.1, "0.1"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e-5, "1.5e-05"),
            (1e-4, "0.0001"),
            (1e100, "1e+100"),
        ];
        for (x, text) in cases {
            assert_eq!(float(x), text);
        }
    }
}
