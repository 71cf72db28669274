//! Filters that compare the items of sequences.

use super::super::arguments::{CallArguments, flag, text_argument};
use super::super::comparison::{equal, order};
use super::super::dict::DictKey;
use super::super::error::{JinjaError, JinjaResult};
use super::super::evaluator::TemplateEvaluator;
use super::super::iteration::{IteratorValue, ValueIterator};
use super::super::value::{JinjaSequence, JinjaValue};
use super::FilterFunction;
use super::attribute_path::{AttributePath, folded};
use std::cmp::Ordering;
use std::collections::HashSet;

/// Returns the filter `name`.
pub(super) fn find(name: &str) -> Option<FilterFunction> {
    Some(match name {
        "sort" => sort,
        "dictsort" => dict_sort,
        "unique" => unique,
        "min" => |evaluator, value, arguments| extreme(evaluator, value, arguments, "min"),
        "max" => |evaluator, value, arguments| extreme(evaluator, value, arguments, "max"),
        "groupby" => group_by,
        _ => return None,
    })
}

/// Value with its sort key.
#[derive(Debug, Clone)]
pub(crate) struct ValueWithSortKey {
    /// Key.
    pub(crate) key: JinjaValue,
    /// Value.
    pub(crate) value: JinjaValue,
}

fn is_less(evaluator: &mut TemplateEvaluator, a: &JinjaValue, b: &JinjaValue) -> JinjaResult<bool> {
    Ok(order(evaluator, "<", a, b)?.is_some_and(Ordering::is_lt))
}

/// Sorts values by their keys; the order of values with equal keys is kept. The standard library's sort
/// cannot be used: a comparison may fail, and NaN has no order.
///
/// Errors: keys have no order, or a limit is exceeded.
pub(crate) fn stable_sort(
    evaluator: &mut TemplateEvaluator,
    mut values: Vec<ValueWithSortKey>,
    is_reversed: bool,
) -> JinjaResult<Vec<ValueWithSortKey>> {
    let mut width = 1;
    while width < values.len() {
        let mut merged = Vec::with_capacity(values.len());
        for run in values.chunks(2 * width) {
            let (left, right) = run.split_at(width.min(run.len()));
            merge_runs(evaluator, left, right, is_reversed, &mut merged)?;
        }
        values = merged;
        width *= 2;
    }
    Ok(values)
}

/// Appends the values of two sorted runs in sorted order. Of values with equal keys, those of `left` come
/// first.
fn merge_runs(
    evaluator: &mut TemplateEvaluator,
    mut left: &[ValueWithSortKey],
    mut right: &[ValueWithSortKey],
    is_reversed: bool,
    merged: &mut Vec<ValueWithSortKey>,
) -> JinjaResult<()> {
    while let ([a, rest_left @ ..], [b, rest_right @ ..]) = (left, right) {
        let takes_right = if is_reversed {
            is_less(evaluator, &a.key, &b.key)?
        } else {
            is_less(evaluator, &b.key, &a.key)?
        };
        if takes_right {
            merged.push(b.clone());
            right = rest_right;
        } else {
            merged.push(a.clone());
            left = rest_left;
        }
    }
    merged.extend_from_slice(left);
    merged.extend_from_slice(right);
    Ok(())
}

fn list_of(values: Vec<ValueWithSortKey>) -> JinjaResult<JinjaValue> {
    JinjaValue::list(values.into_iter().map(|keyed| keyed.value).collect())
}

fn sort(
    evaluator: &mut TemplateEvaluator,
    value: &JinjaValue,
    arguments: CallArguments,
) -> JinjaResult<JinjaValue> {
    let names = ["reverse", "case_sensitive", "attribute"];
    let [reverse, case_sensitive, attribute] = arguments.bind("sort", names, 0)?;
    let case_sensitive = flag(case_sensitive.as_ref(), false);
    let paths = AttributePath::list(attribute.as_ref());
    let mut values = Vec::new();
    for item in evaluator.collect(value)? {
        let mut keys = Vec::with_capacity(paths.len());
        for path in &paths {
            keys.push(path.key(evaluator, &item, case_sensitive)?);
        }
        values.push(ValueWithSortKey { key: JinjaValue::list(keys)?, value: item });
    }
    list_of(stable_sort(evaluator, values, flag(reverse.as_ref(), false))?)
}

fn dict_sort(
    evaluator: &mut TemplateEvaluator,
    value: &JinjaValue,
    arguments: CallArguments,
) -> JinjaResult<JinjaValue> {
    let names = ["case_sensitive", "by", "reverse"];
    let [case_sensitive, by, reverse] = arguments.bind("dictsort", names, 0)?;
    let by = by.map_or(Ok("key".into()), |by| text_argument("dictsort", &by))?;
    let by_value = match &*by {
        "key" => false,
        "value" => true,
        _ => {
            let message = "You can only sort by either \"key\" or \"value\"";
            return Err(JinjaError::runtime(message));
        }
    };
    let dict = match value {
        JinjaValue::Dict(dict) => dict,
        JinjaValue::Undefined(cause) => return Err(cause.error()),
        _ => {
            let kind = value.type_name();
            return Err(JinjaError::type_error(format!(
                "'{kind}' object has no attribute 'items'"
            )));
        }
    };
    let mut values = Vec::new();
    for entry in dict.entries() {
        let mut key = if by_value { entry.value.clone() } else { entry.key.clone() };
        if !flag(case_sensitive.as_ref(), false) {
            key = folded(evaluator, key)?;
        }
        let value = JinjaValue::tuple(vec![entry.key.clone(), entry.value.clone()])?;
        values.push(ValueWithSortKey { key, value });
    }
    list_of(stable_sort(evaluator, values, flag(reverse.as_ref(), false))?)
}

fn unique(
    _: &mut TemplateEvaluator,
    value: &JinjaValue,
    arguments: CallArguments,
) -> JinjaResult<JinjaValue> {
    let [case_sensitive, attribute] =
        arguments.bind("unique", ["case_sensitive", "attribute"], 0)?;
    let case_sensitive = flag(case_sensitive.as_ref(), false);
    let path = AttributePath::new(attribute.as_ref());
    let mut seen = HashSet::new();
    let mut items = ValueIterator::new(value)?;
    let source = JinjaValue::tuple(std::iter::once(value.clone()).chain(attribute).collect())?;
    IteratorValue::value(&source, move |evaluator| {
        while let Some(item) = items.next(evaluator)? {
            evaluator.charge(64)?;
            let key = path.key(evaluator, &item, case_sensitive)?;
            if seen.insert(DictKey::new(&key)?) {
                return Ok(Some(item));
            }
        }
        Ok(None)
    })
}

fn extreme(
    evaluator: &mut TemplateEvaluator,
    value: &JinjaValue,
    arguments: CallArguments,
    name: &str,
) -> JinjaResult<JinjaValue> {
    let [case_sensitive, attribute] = arguments.bind(name, ["case_sensitive", "attribute"], 0)?;
    let case_sensitive = flag(case_sensitive.as_ref(), false);
    let path = AttributePath::new(attribute.as_ref());
    let mut items = ValueIterator::new(value)?;
    let mut best: Option<ValueWithSortKey> = None;
    while let Some(item) = items.next(evaluator)? {
        let key = path.key(evaluator, &item, case_sensitive)?;
        let is_better = match &best {
            None => true,
            Some(best) if name == "min" => is_less(evaluator, &key, &best.key)?,
            Some(best) => is_less(evaluator, &best.key, &key)?,
        };
        if is_better {
            best = Some(ValueWithSortKey { key, value: item });
        }
    }
    let empty = || JinjaValue::undefined("No aggregated item, sequence was empty.");
    Ok(best.map_or_else(empty, |best| best.value))
}

fn group_by(
    evaluator: &mut TemplateEvaluator,
    value: &JinjaValue,
    arguments: CallArguments,
) -> JinjaResult<JinjaValue> {
    let names = ["attribute", "default", "case_sensitive"];
    let [attribute, default, case_sensitive] = arguments.bind("groupby", names, 1)?;
    let case_sensitive = flag(case_sensitive.as_ref(), false);
    let path = AttributePath::new(attribute.as_ref()).with_default(default);
    let mut values = Vec::new();
    for item in evaluator.collect(value)? {
        let key = path.key(evaluator, &item, case_sensitive)?;
        values.push(ValueWithSortKey { key, value: item });
    }
    let mut groups: Vec<(JinjaValue, Vec<JinjaValue>)> = Vec::new();
    for ValueWithSortKey { key, value } in stable_sort(evaluator, values, false)? {
        match groups.last_mut() {
            Some((last, items)) if equal(evaluator, last, &key)? => items.push(value),
            _ => groups.push((key, vec![value])),
        }
    }
    let mut list = Vec::new();
    for (key, items) in groups {
        // The grouper is the attribute of the group's first item in its original case, not in lower case.
        let grouper = if case_sensitive { key } else { path.value(evaluator, &items[0])? };
        let group = JinjaSequence::group(grouper, JinjaValue::list(items)?)?;
        list.push(JinjaValue::Tuple(group));
    }
    JinjaValue::list(list)
}
