//! Comparison and membership with Python's rules.

use super::ast::CompareOperator;
use super::dict::{DictKey, DictViewKind};
use super::error::{JinjaError, JinjaResult};
use super::evaluator::TemplateEvaluator;
use super::iteration::ValueIterator;
use super::numbers::PythonNumber;
use super::value::{JinjaSequence, JinjaValue};
use std::cmp::Ordering;
use std::rc::Rc;

/// Applies a comparison operator.
///
/// Errors: the values have no order, or a limit is exceeded.
pub(crate) fn compare(
    evaluator: &mut TemplateEvaluator,
    operator: CompareOperator,
    left: &JinjaValue,
    right: &JinjaValue,
) -> JinjaResult<bool> {
    Ok(match operator {
        CompareOperator::Equal => equal(evaluator, left, right)?,
        CompareOperator::NotEqual => !equal(evaluator, left, right)?,
        CompareOperator::In => contains(evaluator, right, left)?,
        CompareOperator::NotIn => !contains(evaluator, right, left)?,
        CompareOperator::Less => order(evaluator, "<", left, right)?.is_some_and(Ordering::is_lt),
        CompareOperator::LessEqual => {
            order(evaluator, "<=", left, right)?.is_some_and(Ordering::is_le)
        }
        CompareOperator::Greater => {
            order(evaluator, ">", left, right)?.is_some_and(Ordering::is_gt)
        }
        CompareOperator::GreaterEqual => {
            order(evaluator, ">=", left, right)?.is_some_and(Ordering::is_ge)
        }
    })
}

/// Whether two values are equal.
///
/// Errors: a limit is exceeded.
pub(crate) fn equal(
    evaluator: &mut TemplateEvaluator,
    left: &JinjaValue,
    right: &JinjaValue,
) -> JinjaResult<bool> {
    evaluator.spend(1)?;
    if let (Some(a), Some(b)) = (left.as_str(), right.as_str()) {
        return Ok(a == b);
    }
    if let (Some(a), Some(b)) = (PythonNumber::of(left), PythonNumber::of(right)) {
        return Ok(a.compare(&b) == Some(Ordering::Equal));
    }
    Ok(match (left, right) {
        (JinjaValue::None, JinjaValue::None)
        | (JinjaValue::Undefined(_), JinjaValue::Undefined(_)) => true,
        (JinjaValue::List(a), JinjaValue::List(b))
        | (JinjaValue::Tuple(a), JinjaValue::Tuple(b)) => {
            a.items.len() == b.items.len() && first_difference(evaluator, a, b)?.is_none()
        }
        (JinjaValue::Dict(a), JinjaValue::Dict(b)) => {
            if a.len() != b.len() {
                return Ok(false);
            }
            for entry in a.entries() {
                match b.get(&entry.key)? {
                    Some(value) if same_or_equal(evaluator, &entry.value, value)? => {}
                    _ => return Ok(false),
                }
            }
            true
        }
        (JinjaValue::Bytes(a), JinjaValue::Bytes(b)) => a == b,
        (JinjaValue::Range(_), JinjaValue::Range(_)) => DictKey::new(left)? == DictKey::new(right)?,
        (JinjaValue::View(a), JinjaValue::View(b))
            if a.kind != DictViewKind::Values && b.kind == a.kind =>
        {
            let items = evaluator.collect(left)?;
            let mut all = a.dict.len() == b.dict.len();
            for item in items {
                all = all && contains(evaluator, right, &item)?;
            }
            all
        }
        _ => identical(left, right),
    })
}

/// Whether two values are the same object (Python's `is`).
pub(crate) fn identical(left: &JinjaValue, right: &JinjaValue) -> bool {
    match (left, right) {
        (JinjaValue::None, JinjaValue::None) => true,
        (JinjaValue::Bool(a), JinjaValue::Bool(b)) => a == b,
        (JinjaValue::Int(a), JinjaValue::Int(b)) => a == b,
        (JinjaValue::Str(a), JinjaValue::Str(b)) => a == b,
        (JinjaValue::List(a), JinjaValue::List(b))
        | (JinjaValue::Tuple(a), JinjaValue::Tuple(b)) => Rc::ptr_eq(a, b),
        (JinjaValue::Dict(a), JinjaValue::Dict(b)) => Rc::ptr_eq(a, b),
        (JinjaValue::Iterator(a), JinjaValue::Iterator(b)) => Rc::ptr_eq(a, b),
        (JinjaValue::Namespace(a), JinjaValue::Namespace(b)) => Rc::ptr_eq(a, b),
        (JinjaValue::Macro(a), JinjaValue::Macro(b)) => Rc::ptr_eq(a, b),
        (JinjaValue::Loop(a), JinjaValue::Loop(b)) => Rc::ptr_eq(a, b),
        (JinjaValue::Cycler(a), JinjaValue::Cycler(b)) => Rc::ptr_eq(a, b),
        (JinjaValue::Joiner(a), JinjaValue::Joiner(b)) => Rc::ptr_eq(a, b),
        (JinjaValue::Function(a), JinjaValue::Function(b)) => a == b,
        _ => false,
    }
}

fn same_or_equal(
    evaluator: &mut TemplateEvaluator,
    left: &JinjaValue,
    right: &JinjaValue,
) -> JinjaResult<bool> {
    Ok(identical(left, right) || equal(evaluator, left, right)?)
}

/// Returns the index of the first position at which two sequences have different items.
fn first_difference(
    evaluator: &mut TemplateEvaluator,
    left: &Rc<JinjaSequence>,
    right: &Rc<JinjaSequence>,
) -> JinjaResult<Option<usize>> {
    for (index, (a, b)) in left.items.iter().zip(&right.items).enumerate() {
        if !same_or_equal(evaluator, a, b)? {
            return Ok(Some(index));
        }
    }
    Ok(None)
}

/// Returns the order of two values; `None` if one of them is NaN.
///
/// Errors: the values have no order.
pub(crate) fn order(
    evaluator: &mut TemplateEvaluator,
    symbol: &str,
    left: &JinjaValue,
    right: &JinjaValue,
) -> JinjaResult<Option<Ordering>> {
    evaluator.spend(1)?;
    if let (Some(a), Some(b)) = (left.as_str(), right.as_str()) {
        return Ok(Some(a.cmp(b)));
    }
    if let (Some(a), Some(b)) = (PythonNumber::of(left), PythonNumber::of(right)) {
        return Ok(a.compare(&b));
    }
    match (left, right) {
        (JinjaValue::Undefined(cause), _) | (_, JinjaValue::Undefined(cause)) => Err(cause.error()),
        (JinjaValue::List(a), JinjaValue::List(b))
        | (JinjaValue::Tuple(a), JinjaValue::Tuple(b)) => {
            match first_difference(evaluator, a, b)? {
                Some(index) => order(evaluator, symbol, &a.items[index], &b.items[index]),
                None => Ok(Some(a.items.len().cmp(&b.items.len()))),
            }
        }
        (JinjaValue::Bytes(a), JinjaValue::Bytes(b)) => Ok(Some(a.cmp(b))),
        _ => {
            let [a, b] = [left.type_name(), right.type_name()];
            let message = format!("'{symbol}' not supported between instances of '{a}' and '{b}'");
            Err(JinjaError::type_error(message))
        }
    }
}

/// Whether `container` contains `item`.
///
/// Errors: `container` is not a container, or cannot contain an item of this type.
pub(crate) fn contains(
    evaluator: &mut TemplateEvaluator,
    container: &JinjaValue,
    item: &JinjaValue,
) -> JinjaResult<bool> {
    match container {
        JinjaValue::Str(text) | JinjaValue::Markup(text) => {
            evaluator.spend_bytes(text.len())?;
            let part = item.as_str().ok_or_else(|| {
                let kind = item.type_name();
                JinjaError::type_error(format!(
                    "'in <string>' requires string as left operand, not {kind}"
                ))
            })?;
            Ok(text.contains(part))
        }
        JinjaValue::Dict(dict) => Ok(dict.get(item)?.is_some()),
        JinjaValue::View(view) if view.kind == DictViewKind::Keys => {
            Ok(view.dict.get(item)?.is_some())
        }
        JinjaValue::Range(range) => match PythonNumber::of(item) {
            Some(PythonNumber::Int(number)) => Ok(range.position(number).is_some()),
            Some(PythonNumber::Float(number)) if number.fract() == 0.0 && number.abs() < 9e18 => {
                Ok(range.position(number as i64).is_some())
            }
            _ => Ok(false),
        },
        JinjaValue::Macro(_) | JinjaValue::Namespace(_) | JinjaValue::None => {
            let kind = container.type_name();
            Err(JinjaError::type_error(format!("argument of type '{kind}' is not iterable")))
        }
        _ => {
            let mut items = ValueIterator::new(container).map_err(|_| {
                let kind = container.type_name();
                JinjaError::type_error(format!("argument of type '{kind}' is not iterable"))
            })?;
            while let Some(candidate) = items.next(evaluator)? {
                if same_or_equal(evaluator, &candidate, item)? {
                    return Ok(true);
                }
            }
            Ok(false)
        }
    }
}
