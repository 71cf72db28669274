//! Methods of lists, tuples, ranges, dicts, loops and cyclers.

use super::super::arguments::{CallArguments, integer_argument};
use super::super::comparison::equal;
use super::super::dict::{DictValue, DictView, DictViewKind};
use super::super::error::{JinjaError, JinjaResult};
use super::super::evaluator::TemplateEvaluator;
use super::super::value::JinjaValue;
use super::MethodFunction;
use std::rc::Rc;

/// Returns the method `name` of a list, a tuple or a range.
pub(super) fn find_sequence(value: &JinjaValue, name: &str) -> Option<MethodFunction> {
    Some(match name {
        "index" => index,
        "count" => |evaluator, value, arguments| {
            let [wanted] = arguments.bind_positional("count", 1)?;
            let wanted = wanted.unwrap_or(JinjaValue::None);
            let mut count = 0;
            for item in evaluator.collect(value)? {
                count += i64::from(equal(evaluator, &item, &wanted)?);
            }
            Ok(JinjaValue::Int(count))
        },
        "copy" if matches!(value, JinjaValue::List(_)) => |evaluator, value, arguments| {
            arguments.expect_none("copy")?;
            JinjaValue::list(evaluator.collect(value)?)
        },
        _ => return None,
    })
}

fn index(
    evaluator: &mut TemplateEvaluator,
    value: &JinjaValue,
    arguments: CallArguments,
) -> JinjaResult<JinjaValue> {
    let [wanted, start, stop] = arguments.bind_positional("index", 1)?;
    let wanted = wanted.unwrap_or(JinjaValue::None);
    let items = evaluator.collect(value)?;
    let length = items.len() as i64;
    let bound = |value: Option<JinjaValue>, default: i64| -> JinjaResult<usize> {
        let Some(value) = value else { return Ok(default as usize) };
        let bound = integer_argument(&value)?;
        let bound = if bound < 0 { bound.saturating_add(length) } else { bound };
        Ok(bound.clamp(0, length) as usize)
    };
    let (start, stop) = (bound(start, 0)?, bound(stop, length)?);
    for (at, item) in items.iter().enumerate().take(stop).skip(start) {
        if equal(evaluator, item, &wanted)? {
            return Ok(JinjaValue::Int(at as i64));
        }
    }
    let kind = value.type_name();
    Err(JinjaError::value_error(format!("{kind}.index(x): x not in {kind}")))
}

/// Returns the method `name` of a dict.
pub(super) fn find_dict(name: &str) -> Option<MethodFunction> {
    Some(match name {
        "keys" => |_, value, arguments| view(value, arguments, DictViewKind::Keys),
        "values" => |_, value, arguments| view(value, arguments, DictViewKind::Values),
        "items" => |_, value, arguments| view(value, arguments, DictViewKind::Items),
        "get" => |_, value, arguments| {
            let [key, default] = arguments.bind_positional("get", 1)?;
            let found = dict_of(value)?.get(&key.unwrap_or(JinjaValue::None))?.cloned();
            Ok(found.or(default).unwrap_or(JinjaValue::None))
        },
        "copy" => |_, value, arguments| {
            arguments.expect_none("copy")?;
            Ok(value.clone())
        },
        "fromkeys" => |evaluator, _, arguments| {
            let [keys, default] = arguments.bind_positional("fromkeys", 1)?;
            let default = default.unwrap_or(JinjaValue::None);
            let mut dict = DictValue::default();
            for key in evaluator.collect(&keys.unwrap_or(JinjaValue::None))? {
                evaluator.charge(64)?;
                dict.insert(key, default.clone())?;
            }
            Ok(JinjaValue::dict(dict))
        },
        _ => return None,
    })
}

fn dict_of(value: &JinjaValue) -> JinjaResult<&Rc<DictValue>> {
    match value {
        JinjaValue::Dict(dict) => Ok(dict),
        _ => Err(JinjaError::type_error("the value is no dict")),
    }
}

fn view(
    value: &JinjaValue,
    arguments: CallArguments,
    kind: DictViewKind,
) -> JinjaResult<JinjaValue> {
    arguments.expect_none("dict method")?;
    let dict = Rc::clone(dict_of(value)?);
    Ok(JinjaValue::View(Rc::new(DictView { dict, kind })))
}

/// Returns the method `name` of a loop.
pub(super) fn find_loop(name: &str) -> Option<MethodFunction> {
    Some(match name {
        "cycle" => |_, value, arguments| {
            let JinjaValue::Loop(state) = value else { return Ok(JinjaValue::None) };
            if !arguments.keyword.is_empty() {
                return Err(JinjaError::type_error("cycle() takes no keyword arguments"));
            }
            let items = arguments.positional;
            let index = usize::try_from(state.index0()).unwrap_or(0);
            match items.len() {
                0 => Err(JinjaError::type_error("no items for cycling given")),
                count => Ok(items[index % count].clone()),
            }
        },
        "changed" => |evaluator, value, arguments| {
            let JinjaValue::Loop(state) = value else { return Ok(JinjaValue::None) };
            if !arguments.keyword.is_empty() {
                return Err(JinjaError::type_error("changed() takes no keyword arguments"));
            }
            let values = JinjaValue::tuple(arguments.positional)?;
            Ok(JinjaValue::Bool(state.changed(evaluator, values)?))
        },
        _ => return None,
    })
}

/// Returns the method `name` of a cycler.
pub(super) fn find_cycler(name: &str) -> Option<MethodFunction> {
    Some(match name {
        "next" => |_, value, arguments| {
            arguments.expect_none("next")?;
            let JinjaValue::Cycler(cycler) = value else { return Ok(JinjaValue::None) };
            let position = cycler.position.get();
            cycler.position.set((position + 1) % cycler.items.items.len());
            Ok(cycler.items.items[position].clone())
        },
        "reset" => |_, value, arguments| {
            arguments.expect_none("reset")?;
            let JinjaValue::Cycler(cycler) = value else { return Ok(JinjaValue::None) };
            cycler.position.set(0);
            Ok(JinjaValue::None)
        },
        _ => return None,
    })
}
