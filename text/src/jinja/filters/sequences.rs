//! Filters of sequences, except filters that compare the items.

use super::super::arguments::{CallArguments, flag, integer_argument, text_argument};
use super::super::ast::BinaryOperator;
use super::super::dict::DictViewKind;
use super::super::error::{JinjaError, JinjaResult};
use super::super::evaluator::TemplateEvaluator;
use super::super::iteration::{IteratorValue, ValueIterator};
use super::super::value::JinjaValue;
use super::FilterFunction;
use super::attribute_path::AttributePath;
use std::hash::{BuildHasher, RandomState};

/// Returns the filter `name`.
pub(super) fn find(name: &str) -> Option<FilterFunction> {
    Some(match name {
        "length" | "count" => |evaluator, value, arguments| {
            arguments.expect_none("length")?;
            Ok(JinjaValue::Int(evaluator.length(value)? as i64))
        },
        "list" => |evaluator, value, arguments| {
            arguments.expect_none("list")?;
            JinjaValue::list(evaluator.collect(value)?)
        },
        "first" => |evaluator, value, arguments| {
            arguments.expect_none("first")?;
            let first = ValueIterator::new(value)?.next(evaluator)?;
            Ok(first.unwrap_or_else(|| JinjaValue::undefined("No first item, sequence was empty.")))
        },
        "last" => |evaluator, value, arguments| {
            arguments.expect_none("last")?;
            let last = reversed_items(evaluator, value)?.into_iter().next();
            Ok(last.unwrap_or_else(|| JinjaValue::undefined("No last item, sequence was empty.")))
        },
        "random" => random,
        "reverse" => reverse,
        "join" => join,
        "sum" => sum,
        "batch" => batch,
        "slice" => slice,
        "items" => items,
        "default" | "d" => |_, value, arguments| {
            let [default, boolean] = arguments.bind("default", ["default_value", "boolean"], 0)?;
            let is_replaced =
                value.is_undefined() || flag(boolean.as_ref(), false) && !value.is_true();
            Ok(if is_replaced {
                default.unwrap_or_else(|| JinjaValue::text(""))
            } else {
                value.clone()
            })
        },
        "attr" => |evaluator, value, arguments| {
            let [name] = arguments.bind("attr", ["name"], 1)?;
            let name = text_argument("attr", &name.unwrap_or(JinjaValue::None))?;
            if evaluator.has_attribute(value, &name)? {
                return evaluator.attribute(value, &name);
            }
            let cause = super::super::value::UndefinedValue::Attribute(value.object_name(), name);
            Ok(JinjaValue::Undefined(std::rc::Rc::new(cause)))
        },
        _ => return None,
    })
}

/// Creates an iterator over items that are already computed.
pub(super) fn iterator_of(items: Vec<JinjaValue>) -> JinjaResult<JinjaValue> {
    let source = JinjaValue::list(items)?;
    let mut items = ValueIterator::new(&source)?;
    IteratorValue::value(&source, move |evaluator| items.next(evaluator))
}

/// Returns the items of a reversible value, last item first.
fn reversed_items(
    evaluator: &mut TemplateEvaluator,
    value: &JinjaValue,
) -> JinjaResult<Vec<JinjaValue>> {
    if matches!(value, JinjaValue::Iterator(_) | JinjaValue::Loop(_))
        || ValueIterator::new(value).is_err()
    {
        let kind = value.type_name();
        return Err(JinjaError::type_error(format!("'{kind}' object is not reversible")));
    }
    let mut items = evaluator.collect(value)?;
    items.reverse();
    Ok(items)
}

fn random(
    evaluator: &mut TemplateEvaluator,
    value: &JinjaValue,
    arguments: CallArguments,
) -> JinjaResult<JinjaValue> {
    arguments.expect_none("random")?;
    let length = evaluator.length(value)?;
    if length == 0 {
        return Ok(JinjaValue::undefined("No random item, sequence was empty."));
    }
    // `RandomState` has random keys, so the hash serves as a random number.
    let index = RandomState::new().hash_one(length) % length as u64;
    let item = evaluator.element(value, &JinjaValue::Int(index as i64))?;
    item.ok_or_else(|| JinjaError::type_error("random() needs a sequence"))
}

fn reverse(
    evaluator: &mut TemplateEvaluator,
    value: &JinjaValue,
    arguments: CallArguments,
) -> JinjaResult<JinjaValue> {
    arguments.expect_none("reverse")?;
    if let Some(text) = value.as_str() {
        evaluator.charge(text.len())?;
        return Ok(JinjaValue::text_like(value, text.chars().rev().collect::<String>()));
    }
    match value {
        JinjaValue::List(items) | JinjaValue::Tuple(items) => {
            let mut reversed =
                ValueIterator::Reversed(std::rc::Rc::clone(items), items.items.len());
            IteratorValue::value(value, move |evaluator| reversed.next(evaluator))
        }
        JinjaValue::Iterator(_) => {
            let mut items = evaluator.collect(value)?;
            items.reverse();
            JinjaValue::list(items)
        }
        _ => match reversed_items(evaluator, value) {
            Ok(items) => iterator_of(items),
            Err(_) => Err(JinjaError::runtime("argument must be iterable")),
        },
    }
}

fn join(
    evaluator: &mut TemplateEvaluator,
    value: &JinjaValue,
    arguments: CallArguments,
) -> JinjaResult<JinjaValue> {
    let [separator, attribute] = arguments.bind("join", ["d", "attribute"], 0)?;
    let separator = match separator {
        Some(separator) => evaluator.str_of(&separator)?,
        None => "".into(),
    };
    let path = AttributePath::new(attribute.as_ref());
    let mut items = ValueIterator::new(value)?;
    let mut out = String::new();
    let mut is_first = true;
    while let Some(item) = items.next(evaluator)? {
        let item = path.value(evaluator, &item)?;
        let before = out.len();
        if !is_first {
            out.push_str(&separator);
        }
        is_first = false;
        evaluator.write_str(&item, &mut out)?;
        evaluator.charge(out.len() - before)?;
    }
    Ok(JinjaValue::text(out))
}

fn sum(
    evaluator: &mut TemplateEvaluator,
    value: &JinjaValue,
    arguments: CallArguments,
) -> JinjaResult<JinjaValue> {
    let [attribute, start] = arguments.bind("sum", ["attribute", "start"], 0)?;
    let path = AttributePath::new(attribute.as_ref());
    let mut total = start.unwrap_or(JinjaValue::Int(0));
    if total.as_str().is_some() {
        return Err(JinjaError::type_error("sum() can't sum strings [use ''.join(seq) instead]"));
    }
    let mut items = ValueIterator::new(value)?;
    while let Some(item) = items.next(evaluator)? {
        let item = path.value(evaluator, &item)?;
        total = super::super::arithmetic::binary(evaluator, BinaryOperator::Add, &total, &item)?;
    }
    Ok(total)
}

fn batch(
    evaluator: &mut TemplateEvaluator,
    value: &JinjaValue,
    arguments: CallArguments,
) -> JinjaResult<JinjaValue> {
    let [count, fill] = arguments.bind("batch", ["linecount", "fill_with"], 1)?;
    let count = integer_argument(&count.unwrap_or(JinjaValue::None))?;
    let fill = super::super::arguments::given(fill);
    let mut batches = Vec::new();
    let mut batch = Vec::new();
    for item in evaluator.collect(value)? {
        if batch.len() as i64 == count {
            batches.push(JinjaValue::list(std::mem::take(&mut batch))?);
        }
        batch.push(item);
    }
    if !batch.is_empty() {
        let missing = usize::try_from(count).unwrap_or(0).saturating_sub(batch.len());
        if let Some(fill) = fill {
            evaluator.charge(missing.saturating_mul(size_of::<JinjaValue>()))?;
            batch.extend(std::iter::repeat_n(fill, missing));
        }
        batches.push(JinjaValue::list(batch)?);
    }
    iterator_of(batches)
}

fn slice(
    evaluator: &mut TemplateEvaluator,
    value: &JinjaValue,
    arguments: CallArguments,
) -> JinjaResult<JinjaValue> {
    let [slices, fill] = arguments.bind("slice", ["slices", "fill_with"], 1)?;
    let slices = integer_argument(&slices.unwrap_or(JinjaValue::None))?;
    let fill = super::super::arguments::given(fill);
    let items = evaluator.collect(value)?;
    if slices == 0 {
        return Err(JinjaError::runtime("integer division or modulo by zero"));
    }
    let slices = usize::try_from(slices).unwrap_or(0);
    evaluator.charge(slices.saturating_mul(64))?;
    let size = items.len().checked_div(slices).unwrap_or(0);
    let extra = items.len() - size * slices;
    let mut rest = items.into_iter();
    let mut lists = Vec::new();
    for index in 0..slices {
        let mut part: Vec<JinjaValue> =
            rest.by_ref().take(size + usize::from(index < extra)).collect();
        if index >= extra {
            part.extend(fill.clone());
        }
        lists.push(JinjaValue::list(part)?);
    }
    iterator_of(lists)
}

fn items(
    _: &mut TemplateEvaluator,
    value: &JinjaValue,
    arguments: CallArguments,
) -> JinjaResult<JinjaValue> {
    arguments.expect_none("items")?;
    match value {
        JinjaValue::Undefined(_) => iterator_of(Vec::new()),
        JinjaValue::Dict(dict) => {
            let mut items =
                ValueIterator::Entries(std::rc::Rc::clone(dict), DictViewKind::Items, 0);
            IteratorValue::value(value, move |evaluator| items.next(evaluator))
        }
        _ => Err(JinjaError::type_error("Can only get item pairs from a mapping.")),
    }
}
