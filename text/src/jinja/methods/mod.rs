//! Methods of Python's types that templates can call. Methods that change a list or a dict are absent, because
//! the sandbox rejects them.

mod containers;
mod number_methods;
pub(crate) mod text_case;
pub(crate) mod text_classes;
mod text_methods;
mod text_search;
pub(crate) mod text_split;

pub(crate) use text_methods::{PaddedWidth, PaddingSide, pad_value, strip_value};
pub(crate) use text_search::replaced;

use super::arguments::CallArguments;
use super::error::JinjaResult;
use super::evaluator::TemplateEvaluator;
use super::value::JinjaValue;

/// Implementation of a method; its inputs are the receiver and the arguments.
pub(crate) type MethodFunction =
    fn(&mut TemplateEvaluator, &JinjaValue, CallArguments) -> JinjaResult<JinjaValue>;

/// Returns the method `name` of a value.
pub(crate) fn find(value: &JinjaValue, name: &str) -> Option<MethodFunction> {
    match value {
        JinjaValue::Str(_) | JinjaValue::Markup(_) => text_methods::find(name)
            .or_else(|| text_search::find(name))
            .or_else(|| text_split::find(name))
            .or_else(|| text_classes::find(name))
            .or_else(|| text_methods::find_markup(value, name)),
        JinjaValue::List(_) | JinjaValue::Tuple(_) | JinjaValue::Range(_) => {
            containers::find_sequence(value, name)
        }
        JinjaValue::Dict(_) => containers::find_dict(name),
        JinjaValue::Loop(_) => containers::find_loop(name),
        JinjaValue::Cycler(_) => containers::find_cycler(name),
        JinjaValue::Int(_) | JinjaValue::Big(_) | JinjaValue::Bool(_) => {
            number_methods::find_integer(name)
        }
        JinjaValue::Float(_) => number_methods::find_float(name),
        JinjaValue::Bytes(_) => text_methods::find_bytes(name),
        _ => None,
    }
}
