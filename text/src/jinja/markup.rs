//! HTML escaping for `Markup` strings.

use super::error::JinjaResult;
use super::evaluator::TemplateEvaluator;
use super::value::JinjaValue;
use std::sync::Arc;

/// Replaces the characters that HTML reserves.
pub(crate) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '\'' => out.push_str("&#39;"),
            '"' => out.push_str("&#34;"),
            c => out.push(c),
        }
    }
    out
}

/// Returns the HTML-escaped text of a value; a `Markup` string is returned unchanged.
///
/// Errors: the text of the value varies between runs of Python, or a limit is exceeded.
pub(crate) fn escape_value(
    evaluator: &mut TemplateEvaluator,
    value: &JinjaValue,
) -> JinjaResult<Arc<str>> {
    if let JinjaValue::Markup(text) = value {
        return Ok(Arc::clone(text));
    }
    let text = evaluator.str_of(value)?;
    evaluator.charge(text.len())?;
    if text.contains(['&', '<', '>', '\'', '"']) {
        let escaped = escape(&text);
        evaluator.charge(escaped.len())?;
        return Ok(Arc::from(escaped));
    }
    Ok(text)
}
