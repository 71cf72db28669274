//! Attribute paths such as `function.name`, which filters take as an argument.

use super::super::error::JinjaResult;
use super::super::evaluator::TemplateEvaluator;
use super::super::methods::text_case;
use super::super::value::JinjaValue;

/// Path of attributes and elements, such as `function.name`, that a filter looks up in each item.
#[derive(Debug, Clone, Default)]
pub(super) struct AttributePath {
    parts: Vec<JinjaValue>,
    /// Value that replaces an undefined attribute.
    default: Option<JinjaValue>,
}

impl AttributePath {
    /// Creates the path given by a filter argument.
    pub(super) fn new(attribute: Option<&JinjaValue>) -> Self {
        let parts = match attribute {
            None | Some(JinjaValue::None) => Vec::new(),
            Some(attribute) => match attribute.as_str() {
                Some(path) => path.split('.').map(part).collect(),
                None => vec![attribute.clone()],
            },
        };
        Self { parts, default: None }
    }

    /// Creates the paths given by a filter argument, a string in which commas separate the paths.
    pub(super) fn list(attribute: Option<&JinjaValue>) -> Vec<Self> {
        match attribute.and_then(JinjaValue::as_str) {
            Some(paths) => {
                paths.split(',').map(|path| Self::new(Some(&JinjaValue::text(path)))).collect()
            }
            None => vec![Self::new(attribute)],
        }
    }

    /// Sets the value that replaces an undefined attribute.
    pub(super) fn with_default(mut self, default: Option<JinjaValue>) -> Self {
        self.default = default.filter(|default| !matches!(default, JinjaValue::None));
        self
    }

    /// Returns the value at the path.
    ///
    /// Errors: a value on the path is undefined.
    pub(super) fn value(
        &self,
        evaluator: &mut TemplateEvaluator,
        item: &JinjaValue,
    ) -> JinjaResult<JinjaValue> {
        let mut value = item.clone();
        for part in &self.parts {
            value = evaluator.item(&value, part)?;
            if let Some(default) = self.default.as_ref().filter(|_| value.is_undefined()) {
                value = default.clone();
            }
        }
        Ok(value)
    }

    /// Returns the value at the path as a comparison key: a string is converted to lower case unless
    /// `case_sensitive`.
    ///
    /// Errors: a value on the path is undefined.
    pub(super) fn key(
        &self,
        evaluator: &mut TemplateEvaluator,
        item: &JinjaValue,
        case_sensitive: bool,
    ) -> JinjaResult<JinjaValue> {
        let value = self.value(evaluator, item)?;
        if case_sensitive {
            return Ok(value);
        }
        folded(evaluator, value)
    }
}

/// Converts a string to lower case and returns any other value unchanged.
///
/// Errors: a limit is exceeded.
pub(super) fn folded(
    evaluator: &mut TemplateEvaluator,
    value: JinjaValue,
) -> JinjaResult<JinjaValue> {
    match value.as_str() {
        Some(text) => {
            evaluator.charge(text.len())?;
            evaluator.spend_bytes(text.len())?;
            Ok(JinjaValue::text_like(&value, text_case::lower(text)))
        }
        None => Ok(value),
    }
}

fn part(part: &str) -> JinjaValue {
    let is_number = !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    match part.parse() {
        Ok(number) if is_number => JinjaValue::Int(number),
        _ => JinjaValue::text(part),
    }
}
