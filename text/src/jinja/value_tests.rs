//! Jinja tests, which are applied as `value is test`.

use super::arguments::CallArguments;
use super::arithmetic::binary;
use super::ast::{BinaryOperator, CompareOperator};
use super::calls::is_callable;
use super::comparison::{compare, identical};
use super::dict::DictKey;
use super::error::JinjaResult;
use super::evaluator::TemplateEvaluator;
use super::filters;
use super::iteration::{ValueIterator, length};
use super::methods::text_classes;
use super::value::JinjaValue;

/// Function of a test.
pub(crate) type JinjaTestFunction =
    fn(&mut TemplateEvaluator, &JinjaValue, CallArguments) -> JinjaResult<bool>;

/// Returns the Jinja test `name`.
pub(crate) fn find(name: &str) -> Option<JinjaTestFunction> {
    Some(match name {
        "defined" => |_, value, arguments| plain("defined", arguments, !value.is_undefined()),
        "undefined" => |_, value, arguments| plain("undefined", arguments, value.is_undefined()),
        "none" => |_, value, arguments| plain("none", arguments, matches!(value, JinjaValue::None)),
        "boolean" => {
            |_, value, arguments| plain("boolean", arguments, matches!(value, JinjaValue::Bool(_)))
        }
        "true" => {
            |_, value, arguments| plain("true", arguments, matches!(value, JinjaValue::Bool(true)))
        }
        "false" => |_, value, arguments| {
            plain("false", arguments, matches!(value, JinjaValue::Bool(false)))
        },
        "integer" => |_, value, arguments| {
            let is_integer = matches!(value, JinjaValue::Int(_) | JinjaValue::Big(_));
            plain("integer", arguments, is_integer)
        },
        "float" => {
            |_, value, arguments| plain("float", arguments, matches!(value, JinjaValue::Float(_)))
        }
        "number" => |_, value, arguments| {
            let is_number = super::numbers::PythonNumber::of(value).is_some();
            plain("number", arguments, is_number)
        },
        "string" => |_, value, arguments| plain("string", arguments, value.as_str().is_some()),
        "mapping" => {
            |_, value, arguments| plain("mapping", arguments, matches!(value, JinjaValue::Dict(_)))
        }
        "sequence" => |_, value, arguments| {
            let has_length = length(value).is_some();
            plain("sequence", arguments, has_length && !matches!(value, JinjaValue::View(_)))
        },
        "iterable" => {
            |_, value, arguments| plain("iterable", arguments, ValueIterator::new(value).is_ok())
        }
        "callable" => |_, value, arguments| plain("callable", arguments, is_callable(value)),
        "escaped" => |_, value, arguments| {
            plain("escaped", arguments, matches!(value, JinjaValue::Markup(_)))
        },
        "lower" => |evaluator, value, arguments| {
            let text = evaluator.str_of(value)?;
            plain("lower", arguments, text_classes::is_lower(&text))
        },
        "upper" => |evaluator, value, arguments| {
            let text = evaluator.str_of(value)?;
            plain("upper", arguments, text_classes::is_upper(&text))
        },
        "odd" => |evaluator, value, arguments| {
            arguments.expect_none("odd")?;
            has_remainder(evaluator, value, &JinjaValue::Int(2), 1)
        },
        "even" => |evaluator, value, arguments| {
            arguments.expect_none("even")?;
            has_remainder(evaluator, value, &JinjaValue::Int(2), 0)
        },
        "divisibleby" => |evaluator, value, arguments| {
            let [number] = arguments.bind("divisibleby", ["num"], 1)?;
            has_remainder(evaluator, value, &number.unwrap_or(JinjaValue::None), 0)
        },
        "sameas" => |_, value, arguments| {
            let [other] = arguments.bind("sameas", ["other"], 1)?;
            Ok(identical(value, &other.unwrap_or(JinjaValue::None)))
        },
        "filter" => |_, value, arguments| {
            DictKey::new(value)?;
            let exists = value.as_str().is_some_and(|name| filters::find(name).is_some());
            plain("filter", arguments, exists)
        },
        "test" => |_, value, arguments| {
            DictKey::new(value)?;
            plain("test", arguments, value.as_str().is_some_and(|name| find(name).is_some()))
        },
        "in" => |evaluator, value, arguments| {
            let [container] = arguments.bind("in", ["seq"], 1)?;
            compare(evaluator, CompareOperator::In, value, &container.unwrap_or(JinjaValue::None))
        },
        _ => return find_comparison(name),
    })
}

fn find_comparison(name: &str) -> Option<JinjaTestFunction> {
    Some(match name {
        "==" | "eq" | "equalto" => |evaluator, value, arguments| {
            compared(evaluator, CompareOperator::Equal, value, arguments)
        },
        "!=" | "ne" => |evaluator, value, arguments| {
            compared(evaluator, CompareOperator::NotEqual, value, arguments)
        },
        "<" | "lt" | "lessthan" => |evaluator, value, arguments| {
            compared(evaluator, CompareOperator::Less, value, arguments)
        },
        "<=" | "le" => |evaluator, value, arguments| {
            compared(evaluator, CompareOperator::LessEqual, value, arguments)
        },
        ">" | "gt" | "greaterthan" => |evaluator, value, arguments| {
            compared(evaluator, CompareOperator::Greater, value, arguments)
        },
        ">=" | "ge" => |evaluator, value, arguments| {
            compared(evaluator, CompareOperator::GreaterEqual, value, arguments)
        },
        _ => return None,
    })
}

/// Checks that the Jinja test `name` was called without arguments, and returns `result`.
fn plain(name: &str, arguments: CallArguments, result: bool) -> JinjaResult<bool> {
    arguments.expect_none(name)?;
    Ok(result)
}

fn has_remainder(
    evaluator: &mut TemplateEvaluator,
    value: &JinjaValue,
    divisor: &JinjaValue,
    expected: i64,
) -> JinjaResult<bool> {
    let remainder = binary(evaluator, BinaryOperator::Modulo, value, divisor)?;
    compare(evaluator, CompareOperator::Equal, &remainder, &JinjaValue::Int(expected))
}

fn compared(
    evaluator: &mut TemplateEvaluator,
    operator: CompareOperator,
    value: &JinjaValue,
    arguments: CallArguments,
) -> JinjaResult<bool> {
    let [other] = arguments.bind_positional("comparison", 1)?;
    compare(evaluator, operator, value, &other.unwrap_or(JinjaValue::None))
}
