//! Filters that map items, and filters that select items by a test. Their results are iterators.

use super::super::arguments::CallArguments;
use super::super::error::{JinjaError, JinjaResult};
use super::super::evaluator::TemplateEvaluator;
use super::super::iteration::{IteratorValue, ValueIterator};
use super::super::value::JinjaValue;
use super::super::value_tests;
use super::FilterFunction;
use super::attribute_path::AttributePath;
use super::sequences::iterator_of;
use std::sync::Arc;

/// Returns the filter `name`.
pub(super) fn find(name: &str) -> Option<FilterFunction> {
    Some(match name {
        "map" => |_, value, arguments| map(value, arguments),
        "select" => |_, value, arguments| select(value, arguments, false, true),
        "reject" => |_, value, arguments| select(value, arguments, false, false),
        "selectattr" => |_, value, arguments| select(value, arguments, true, true),
        "rejectattr" => |_, value, arguments| select(value, arguments, true, false),
        _ => return None,
    })
}

/// Operation that the filter `map` applies to each item: looks up an attribute, or applies a filter.
enum MapFilterOperation {
    Attribute(AttributePath),
    Filter(Arc<str>, CallArguments),
}

impl MapFilterOperation {
    fn new(mut arguments: CallArguments) -> JinjaResult<Self> {
        let has_attribute = arguments.keyword.iter().any(|argument| &*argument.name == "attribute");
        if arguments.positional.is_empty() && has_attribute {
            let [attribute, default] = arguments.bind("map", ["attribute", "default"], 0)?;
            return Ok(Self::Attribute(
                AttributePath::new(attribute.as_ref()).with_default(default),
            ));
        }
        if arguments.positional.is_empty() {
            return Err(JinjaError::runtime("map requires a filter argument"));
        }
        let name = arguments.positional.remove(0);
        let name = name.as_text().map(Arc::clone);
        let name =
            name.ok_or_else(|| JinjaError::runtime("the name of a filter must be a string"))?;
        Ok(Self::Filter(name, arguments))
    }

    fn apply(
        &self,
        evaluator: &mut TemplateEvaluator,
        item: &JinjaValue,
    ) -> JinjaResult<JinjaValue> {
        match self {
            Self::Attribute(path) => path.value(evaluator, item),
            Self::Filter(name, arguments) => {
                let Some(function) = super::find(name) else {
                    return Err(JinjaError::runtime(format!("No filter named '{name}'.")));
                };
                function(evaluator, item, arguments.clone())
            }
        }
    }
}

fn map(value: &JinjaValue, arguments: CallArguments) -> JinjaResult<JinjaValue> {
    if !value.is_true() {
        return iterator_of(Vec::new());
    }
    let source = with_arguments(value, &arguments)?;
    let mut state = LazyIteration::Pending(value.clone(), arguments);
    let mut mapping = None;
    IteratorValue::value(&source, move |evaluator| {
        if let Some(arguments) = state.begin()? {
            mapping = Some(MapFilterOperation::new(arguments)?);
        }
        match (state.next(evaluator)?, &mapping) {
            (Some(item), Some(mapping)) => mapping.apply(evaluator, &item).map(Some),
            _ => Ok(None),
        }
    })
}

/// Returns a tuple of the iterated value and all arguments. The nesting depth of an iterator is computed from
/// this tuple, because the iterator holds these values.
fn with_arguments(value: &JinjaValue, arguments: &CallArguments) -> JinjaResult<JinjaValue> {
    let keyword = arguments.keyword.iter().map(|argument| &argument.value);
    let values = std::iter::once(value).chain(&arguments.positional).chain(keyword);
    JinjaValue::tuple(values.cloned().collect())
}

/// Iteration that begins when the first item is taken, like a Python generator.
enum LazyIteration {
    Pending(JinjaValue, CallArguments),
    Begun(ValueIterator),
}

impl LazyIteration {
    /// Begins the iteration. Returns the arguments on the first call, `None` on later calls.
    fn begin(&mut self) -> JinjaResult<Option<CallArguments>> {
        let Self::Pending(value, arguments) = self else { return Ok(None) };
        let arguments = std::mem::take(arguments);
        *self = Self::Begun(ValueIterator::new(value)?);
        Ok(Some(arguments))
    }

    fn next(&mut self, evaluator: &mut TemplateEvaluator) -> JinjaResult<Option<JinjaValue>> {
        match self {
            Self::Pending(..) => Ok(None),
            Self::Begun(items) => items.next(evaluator),
        }
    }
}

/// Condition by which `select`, `reject`, `selectattr` and `rejectattr` choose items.
struct SelectFilterCondition {
    path: AttributePath,
    /// Name of the test; `None` tests whether the value is true.
    test: Option<Arc<str>>,
    arguments: CallArguments,
}

impl SelectFilterCondition {
    fn new(mut arguments: CallArguments, of_attribute: bool) -> JinjaResult<Self> {
        let mut path = AttributePath::default();
        if of_attribute {
            if arguments.positional.is_empty() {
                return Err(JinjaError::runtime("Missing parameter for attribute name"));
            }
            path = AttributePath::new(Some(&arguments.positional.remove(0)));
        }
        let test = if arguments.positional.is_empty() {
            None
        } else {
            let name = arguments.positional.remove(0);
            let name = name.as_text().map(Arc::clone);
            Some(name.ok_or_else(|| JinjaError::runtime("the name of a test must be a string"))?)
        };
        Ok(Self { path, test, arguments })
    }

    fn holds(&self, evaluator: &mut TemplateEvaluator, item: &JinjaValue) -> JinjaResult<bool> {
        let value = self.path.value(evaluator, item)?;
        let Some(name) = &self.test else { return Ok(value.is_true()) };
        let Some(function) = value_tests::find(name) else {
            return Err(JinjaError::runtime(format!("No test named '{name}'.")));
        };
        function(evaluator, &value, self.arguments.clone())
    }
}

fn select(
    value: &JinjaValue,
    arguments: CallArguments,
    of_attribute: bool,
    is_selected: bool,
) -> JinjaResult<JinjaValue> {
    if !value.is_true() {
        return iterator_of(Vec::new());
    }
    let source = with_arguments(value, &arguments)?;
    let mut state = LazyIteration::Pending(value.clone(), arguments);
    let mut test = None;
    IteratorValue::value(&source, move |evaluator| {
        if let Some(arguments) = state.begin()? {
            test = Some(SelectFilterCondition::new(arguments, of_attribute)?);
        }
        let Some(test) = &test else { return Ok(None) };
        while let Some(item) = state.next(evaluator)? {
            if test.holds(evaluator, &item)? == is_selected {
                return Ok(Some(item));
            }
        }
        Ok(None)
    })
}
