//! The filters of Jinja2; `tojson` behaves as in transformers.

mod attribute_path;
mod conversion;
mod html;
mod pretty;
mod selection;
mod sequences;
mod sort_filters;
mod text_filters;
mod word_wrap;

pub(crate) use html::strip_tags;
pub(crate) use sort_filters::{ValueWithSortKey, stable_sort};

use super::arguments::CallArguments;
use super::error::JinjaResult;
use super::evaluator::TemplateEvaluator;
use super::value::JinjaValue;

/// Implementation of a filter; its inputs are the filtered value and the arguments.
pub(crate) type FilterFunction =
    fn(&mut TemplateEvaluator, &JinjaValue, CallArguments) -> JinjaResult<JinjaValue>;

/// Returns the filter `name`.
pub(crate) fn find(name: &str) -> Option<FilterFunction> {
    text_filters::find(name)
        .or_else(|| sequences::find(name))
        .or_else(|| sort_filters::find(name))
        .or_else(|| selection::find(name))
        .or_else(|| conversion::find(name))
        .or_else(|| html::find(name))
}
