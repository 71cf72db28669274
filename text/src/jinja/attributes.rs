//! Attributes and elements of values, with the lookups of Jinja2's immutable sandbox.

use super::error::JinjaResult;
use super::evaluator::TemplateEvaluator;
use super::methods;
use super::numbers::PythonNumber;
use super::value::{BoundMethod, JinjaValue, UndefinedValue};
use std::rc::Rc;
use std::sync::Arc;

/// Methods that change a list, which the sandbox rejects.
const LIST_CHANGES: [&str; 8] =
    ["append", "clear", "pop", "reverse", "insert", "sort", "extend", "remove"];

/// Methods that change a dict, which the sandbox rejects.
const DICT_CHANGES: [&str; 5] = ["clear", "pop", "popitem", "setdefault", "update"];

/// Attributes of every Python object, which the sandbox rejects. The values of this interpreter have no other
/// attributes whose names begin with an underscore.
const OBJECT_ATTRIBUTES: [&str; 22] = [
    "__class__",
    "__delattr__",
    "__dir__",
    "__doc__",
    "__eq__",
    "__format__",
    "__ge__",
    "__getattribute__",
    "__gt__",
    "__hash__",
    "__init__",
    "__init_subclass__",
    "__le__",
    "__lt__",
    "__ne__",
    "__new__",
    "__reduce__",
    "__reduce_ex__",
    "__repr__",
    "__setattr__",
    "__sizeof__",
    "__str__",
];

/// Result of looking up an attribute of a value: its value, unsafe (rejected by the sandbox), or missing.
enum AttributeLookupResult {
    Value(JinjaValue),
    Unsafe,
    Missing,
}

impl TemplateEvaluator {
    /// Returns `value.name`: the attribute, or the element with this key if there is no such attribute.
    ///
    /// Errors: the value is undefined, or computing the attribute fails.
    pub(crate) fn attribute(
        &mut self,
        value: &JinjaValue,
        name: &Arc<str>,
    ) -> JinjaResult<JinjaValue> {
        match self.find_attribute(value, name)? {
            AttributeLookupResult::Value(found) => Ok(found),
            AttributeLookupResult::Unsafe => Ok(unsafe_attribute(value, name)),
            AttributeLookupResult::Missing => {
                if let JinjaValue::Dict(dict) = value
                    && let Some(found) = dict.get_text(name)
                {
                    return Ok(found.clone());
                }
                if let JinjaValue::TemplateBlocks = value
                    && let Some(block) = self.block_named(name)
                {
                    return Ok(block);
                }
                Ok(missing_attribute(value, name))
            }
        }
    }

    /// Returns `value[index]`: the element, or the attribute with this name if there is no such element.
    ///
    /// Errors: the value is undefined, or computing the attribute fails.
    pub(crate) fn item(
        &mut self,
        value: &JinjaValue,
        index: &JinjaValue,
    ) -> JinjaResult<JinjaValue> {
        if let Some(found) = self.element(value, index)? {
            return Ok(found);
        }
        if let Some(name) = index.as_text() {
            match self.find_attribute(value, name)? {
                AttributeLookupResult::Value(found) => return Ok(found),
                AttributeLookupResult::Unsafe => return Ok(unsafe_attribute(value, name)),
                AttributeLookupResult::Missing => return Ok(missing_attribute(value, name)),
            }
        }
        let index = self.repr_of(index).unwrap_or_default();
        let cause = UndefinedValue::Element(value.object_name(), index);
        Ok(JinjaValue::Undefined(Rc::new(cause)))
    }

    /// Returns the element `value[index]` by Python's rules; `None` if Python would raise a `TypeError` or a
    /// `LookupError`.
    pub(crate) fn element(
        &mut self,
        value: &JinjaValue,
        index: &JinjaValue,
    ) -> JinjaResult<Option<JinjaValue>> {
        let position = match PythonNumber::of(index) {
            Some(PythonNumber::Int(position)) => Some(position),
            _ => None,
        };
        Ok(match value {
            JinjaValue::Undefined(cause) => return Err(cause.error()),
            JinjaValue::Dict(dict) => dict.get(index).ok().flatten().cloned(),
            JinjaValue::List(items) | JinjaValue::Tuple(items) => position
                .and_then(|at| absolute(at, items.items.len()))
                .map(|at| items.items[at].clone()),
            JinjaValue::Str(text) | JinjaValue::Markup(text) => {
                let Some(position) = position else { return Ok(None) };
                self.spend_bytes(text.len())?;
                character(text, position).map(|c| JinjaValue::text_like(value, c.to_string()))
            }
            JinjaValue::Bytes(bytes) => position
                .and_then(|at| absolute(at, bytes.len()))
                .map(|at| JinjaValue::Int(i64::from(bytes[at]))),
            JinjaValue::Range(range) => position
                .and_then(|at| absolute(at, range.len() as usize))
                .map(|at| JinjaValue::Int(range.at(at as u64))),
            JinjaValue::TemplateBlocks => index.as_text().and_then(|name| self.block_named(name)),
            _ => None,
        })
    }

    /// Returns the block `name` of the template as a value; `None` if there is no such block.
    fn block_named(&self, name: &Arc<str>) -> Option<JinjaValue> {
        self.block(name).map(|_| JinjaValue::Block(Arc::clone(name)))
    }

    /// Looks up an attribute as Python's `getattr` does: found, missing, or rejected by the sandbox.
    fn find_attribute(
        &mut self,
        value: &JinjaValue,
        name: &str,
    ) -> JinjaResult<AttributeLookupResult> {
        if let JinjaValue::Undefined(cause) = value {
            let is_known = OBJECT_ATTRIBUTES.contains(&name);
            return if is_known { Ok(AttributeLookupResult::Unsafe) } else { Err(cause.error()) };
        }
        if let JinjaValue::Namespace(namespace) = value {
            let key = Arc::from(name);
            let found = namespace.attributes.borrow().get_text(&key).cloned();
            return Ok(match found {
                Some(_) if name.starts_with('_') => AttributeLookupResult::Unsafe,
                Some(found) => AttributeLookupResult::Value(found),
                None => AttributeLookupResult::Missing,
            });
        }
        if OBJECT_ATTRIBUTES.contains(&name) {
            return Ok(AttributeLookupResult::Unsafe);
        }
        let changes = match value {
            JinjaValue::List(_) => LIST_CHANGES.contains(&name),
            JinjaValue::Dict(_) => DICT_CHANGES.contains(&name),
            _ => false,
        };
        if changes {
            return Ok(AttributeLookupResult::Unsafe);
        }
        if let Some(function) = methods::find(value, name) {
            let method = BoundMethod { receiver: value.clone(), function };
            return Ok(AttributeLookupResult::Value(JinjaValue::Method(Rc::new(method))));
        }
        Ok(match self.property(value, name)? {
            Some(found) => AttributeLookupResult::Value(found),
            None => AttributeLookupResult::Missing,
        })
    }

    /// Returns the value of an attribute that is not a method; `None` if there is no such attribute.
    fn property(&mut self, value: &JinjaValue, name: &str) -> JinjaResult<Option<JinjaValue>> {
        let integer = |number: usize| JinjaValue::Int(number as i64);
        Ok(Some(match (value, name) {
            (JinjaValue::Loop(state), _) => {
                let state = Rc::clone(state);
                match name {
                    "index0" => JinjaValue::Int(state.index0()),
                    "index" => JinjaValue::Int(state.index0() + 1),
                    "first" => JinjaValue::Bool(state.index0() == 0),
                    "last" => JinjaValue::Bool(state.peek(self)?.is_none()),
                    "length" => integer(state.length(self)?),
                    "revindex" => JinjaValue::Int(state.length(self)? as i64 - state.index0()),
                    "revindex0" => JinjaValue::Int(state.length(self)? as i64 - state.index0() - 1),
                    "depth" => integer(state.depth0 + 1),
                    "depth0" => integer(state.depth0),
                    "previtem" => {
                        let previous = if state.index0() == 0 { None } else { state.previous() };
                        previous
                            .unwrap_or_else(|| JinjaValue::undefined("there is no previous item"))
                    }
                    "nextitem" => state
                        .peek(self)?
                        .unwrap_or_else(|| JinjaValue::undefined("there is no next item")),
                    _ => return Ok(None),
                }
            }
            (JinjaValue::Macro(definition), "name") => match &definition.node.name {
                Some(name) => JinjaValue::Str(Arc::clone(name)),
                None => JinjaValue::None,
            },
            (JinjaValue::Macro(definition), "arguments") => {
                let names = definition.node.parameters.iter();
                JinjaValue::tuple(names.map(|p| JinjaValue::Str(Arc::clone(&p.name))).collect())?
            }
            (JinjaValue::Macro(definition), "catch_kwargs") => {
                JinjaValue::Bool(definition.node.uses.kwargs)
            }
            (JinjaValue::Macro(definition), "catch_varargs") => {
                JinjaValue::Bool(definition.node.uses.varargs)
            }
            (JinjaValue::Macro(definition), "caller") => {
                JinjaValue::Bool(definition.node.uses.caller)
            }
            (JinjaValue::Cycler(cycler), "current") => {
                cycler.items.items[cycler.position.get()].clone()
            }
            (JinjaValue::Cycler(cycler), "items") => JinjaValue::Tuple(Rc::clone(&cycler.items)),
            (JinjaValue::Cycler(cycler), "pos") => integer(cycler.position.get()),
            (JinjaValue::Joiner(joiner), "sep") => joiner.separator.clone(),
            (JinjaValue::Joiner(joiner), "used") => JinjaValue::Bool(joiner.used.get()),
            (JinjaValue::Tuple(group), "grouper") if group.is_group => group.items[0].clone(),
            (JinjaValue::Tuple(group), "list") if group.is_group => group.items[1].clone(),
            (JinjaValue::Range(range), "start") => JinjaValue::Int(range.start),
            (JinjaValue::Range(range), "stop") => JinjaValue::Int(range.stop),
            (JinjaValue::Range(range), "step") => JinjaValue::Int(range.step),
            (JinjaValue::Int(_) | JinjaValue::Big(_), "real" | "numerator")
            | (JinjaValue::Float(_), "real") => value.clone(),
            (JinjaValue::Bool(flag), "real" | "numerator") => JinjaValue::Int(i64::from(*flag)),
            (JinjaValue::Int(_) | JinjaValue::Big(_) | JinjaValue::Bool(_), "imag") => {
                JinjaValue::Int(0)
            }
            (JinjaValue::Float(_), "imag") => JinjaValue::Float(0.0),
            (JinjaValue::Int(_) | JinjaValue::Big(_) | JinjaValue::Bool(_), "denominator") => {
                JinjaValue::Int(1)
            }
            _ => return Ok(None),
        }))
    }

    /// Whether a value has an attribute, by the rules of the filter `attr`.
    pub(crate) fn has_attribute(&mut self, value: &JinjaValue, name: &str) -> JinjaResult<bool> {
        Ok(!matches!(self.find_attribute(value, name)?, AttributeLookupResult::Missing))
    }
}

/// Converts a Python index, which may be negative, to an offset from the start; `None` if out of range.
pub(crate) fn absolute(index: i64, length: usize) -> Option<usize> {
    let index = if index < 0 { index.checked_add(length as i64)? } else { index };
    usize::try_from(index).ok().filter(|index| *index < length)
}

fn character(text: &str, index: i64) -> Option<char> {
    if text.is_ascii() {
        return absolute(index, text.len()).map(|at| text.as_bytes()[at] as char);
    }
    match usize::try_from(index) {
        Ok(index) => text.chars().nth(index),
        Err(_) => text.chars().rev().nth(usize::try_from(-1 - index).ok()?),
    }
}

fn missing_attribute(value: &JinjaValue, name: &Arc<str>) -> JinjaValue {
    let cause = UndefinedValue::Attribute(value.object_name(), Arc::clone(name));
    JinjaValue::Undefined(Rc::new(cause))
}

fn unsafe_attribute(value: &JinjaValue, name: &Arc<str>) -> JinjaValue {
    JinjaValue::Undefined(Rc::new(UndefinedValue::Unsafe(value.type_name(), Arc::clone(name))))
}
