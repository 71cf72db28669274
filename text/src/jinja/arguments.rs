//! Arguments of calls, and their assignment to the parameters of functions written in Rust.

use super::error::{JinjaError, JinjaResult};
use super::numbers::PythonNumber;
use super::value::JinjaValue;
use std::sync::Arc;

/// Arguments of a call.
#[derive(Debug, Clone, Default)]
pub(crate) struct CallArguments {
    /// Positional arguments.
    pub(crate) positional: Vec<JinjaValue>,
    /// Keyword arguments.
    pub(crate) keyword: Vec<KeywordArgumentValue>,
}

/// Value with a name.
#[derive(Debug, Clone)]
pub(crate) struct KeywordArgumentValue {
    /// Name.
    pub(crate) name: Arc<str>,
    /// Value.
    pub(crate) value: JinjaValue,
}

impl CallArguments {
    /// Adds a keyword argument.
    ///
    /// Errors: the call has an argument of this name.
    pub(crate) fn push_keyword(&mut self, name: Arc<str>, value: JinjaValue) -> JinjaResult<()> {
        if self.keyword.iter().any(|argument| argument.name == name) {
            let message = format!("got multiple values for keyword argument '{name}'");
            return Err(JinjaError::type_error(message));
        }
        self.keyword.push(KeywordArgumentValue { name, value });
        Ok(())
    }

    /// Adds the entries of a dict as keyword arguments.
    ///
    /// Errors: `values` is not a dict with string keys, or repeats an argument name.
    pub(crate) fn spread_keyword(&mut self, values: &JinjaValue) -> JinjaResult<()> {
        let JinjaValue::Dict(dict) = values else {
            let kind = values.type_name();
            return Err(JinjaError::type_error(format!(
                "argument after ** must be a mapping, not {kind}"
            )));
        };
        for entry in dict.entries() {
            let Some(name) = entry.key.as_text() else {
                return Err(JinjaError::type_error("keywords must be strings"));
            };
            self.push_keyword(Arc::clone(name), entry.value.clone())?;
        }
        Ok(())
    }

    /// Binds the arguments to the named parameters; the first `required` parameters are mandatory.
    ///
    /// Errors: a mandatory argument is missing, or an argument matches no parameter.
    pub(crate) fn bind<const N: usize>(
        self,
        function: &str,
        names: [&str; N],
        required: usize,
    ) -> JinjaResult<[Option<JinjaValue>; N]> {
        let mut bound = [const { None }; N];
        let given = self.positional.len();
        if given > N {
            let message = format!("{function}() takes at most {N} arguments ({given} given)");
            return Err(JinjaError::type_error(message));
        }
        for (slot, value) in bound.iter_mut().zip(self.positional) {
            *slot = Some(value);
        }
        for argument in self.keyword {
            bind_keyword(function, &names, &mut bound, argument)?;
        }
        if let Some(missing) = bound[..required].iter().position(Option::is_none) {
            let name = names[missing];
            let message = format!("{function}() missing required argument: '{name}'");
            return Err(JinjaError::type_error(message));
        }
        Ok(bound)
    }

    /// Binds the arguments to positional-only parameters; the first `required` parameters are mandatory.
    ///
    /// Errors: a mandatory argument is missing, or an argument matches no parameter.
    pub(crate) fn bind_positional<const N: usize>(
        self,
        function: &str,
        required: usize,
    ) -> JinjaResult<[Option<JinjaValue>; N]> {
        if !self.keyword.is_empty() {
            return Err(JinjaError::type_error(format!("{function}() takes no keyword arguments")));
        }
        self.bind(function, [""; N], required)
    }

    /// Checks that the call has no arguments.
    ///
    /// Errors: the call has an argument.
    pub(crate) fn expect_none(self, function: &str) -> JinjaResult<()> {
        self.bind_positional::<0>(function, 0).map(drop)
    }
}

/// Binds a keyword argument to the parameter of its name; `names` and `bound` are the names and the values of
/// the parameters.
fn bind_keyword(
    function: &str,
    names: &[&str],
    bound: &mut [Option<JinjaValue>],
    argument: KeywordArgumentValue,
) -> JinjaResult<()> {
    let KeywordArgumentValue { name, value } = argument;
    let Some(index) = names.iter().position(|parameter| **parameter == *name) else {
        let message = format!("{function}() got an unexpected keyword argument '{name}'");
        return Err(JinjaError::type_error(message));
    };
    if bound[index].replace(value).is_some() {
        let message = format!("{function}() got multiple values for argument '{name}'");
        return Err(JinjaError::type_error(message));
    }
    Ok(())
}

/// Returns the text of a string argument.
///
/// Errors: the value is not a string.
pub(crate) fn text_argument(function: &str, value: &JinjaValue) -> JinjaResult<Arc<str>> {
    match value {
        JinjaValue::Undefined(cause) => Err(cause.error()),
        _ => value.as_text().map(Arc::clone).ok_or_else(|| {
            let kind = value.type_name();
            JinjaError::type_error(format!("{function}() argument must be str, not {kind}"))
        }),
    }
}

/// Returns an integer argument; an integer of more than 64 bits is clamped to the `i64` range.
///
/// Errors: the value is not an integer.
pub(crate) fn integer_argument(value: &JinjaValue) -> JinjaResult<i64> {
    match PythonNumber::of(value) {
        Some(PythonNumber::Int(number)) => Ok(number),
        Some(PythonNumber::Big(number)) => {
            let is_negative = number.sign() == num_bigint::Sign::Minus;
            Ok(if is_negative { i64::MIN } else { i64::MAX })
        }
        _ => {
            if let JinjaValue::Undefined(cause) = value {
                return Err(cause.error());
            }
            let kind = value.type_name();
            Err(JinjaError::type_error(format!(
                "'{kind}' object cannot be interpreted as an integer"
            )))
        }
    }
}

/// Returns an optional integer argument, or `default` if the argument is absent.
///
/// Errors: the value is not an integer.
pub(crate) fn integer_or(value: Option<&JinjaValue>, default: i64) -> JinjaResult<i64> {
    value.map_or(Ok(default), integer_argument)
}

/// Returns the truth value of an optional argument, or `default` if the argument is absent.
pub(crate) fn flag(value: Option<&JinjaValue>, default: bool) -> bool {
    value.map_or(default, JinjaValue::is_true)
}

/// Returns an optional argument; a `none` value counts as an absent argument.
pub(crate) fn given(value: Option<JinjaValue>) -> Option<JinjaValue> {
    value.filter(|value| !matches!(value, JinjaValue::None))
}
