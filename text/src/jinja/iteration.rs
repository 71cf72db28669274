//! Iteration over values. Filters that are generators in Jinja2 return an iterator, which computes its items
//! lazily and can be consumed once.

use super::dict::{DictValue, DictViewKind};
use super::error::{JinjaError, JinjaErrorKind, JinjaResult};
use super::evaluator::TemplateEvaluator;
use super::value::{JinjaSequence, JinjaValue, RangeValue, VALUE_DEPTH_MAX};
use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;

/// Function that computes the next item of an iterator.
pub(crate) type NextFunction =
    Box<dyn FnMut(&mut TemplateEvaluator) -> JinjaResult<Option<JinjaValue>>>;

/// Iterator that can be consumed once.
pub(crate) struct IteratorValue {
    next: RefCell<Option<NextFunction>>,
    depth: u16,
}

impl fmt::Debug for IteratorValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IteratorValue").field("depth", &self.depth).finish_non_exhaustive()
    }
}

impl IteratorValue {
    /// Creates an iterator over items that derive from `source`.
    ///
    /// Errors: the source is nested too deeply.
    pub(crate) fn value(
        source: &JinjaValue,
        next: impl FnMut(&mut TemplateEvaluator) -> JinjaResult<Option<JinjaValue>> + 'static,
    ) -> JinjaResult<JinjaValue> {
        let depth = source.depth() + 1;
        if depth > VALUE_DEPTH_MAX {
            return Err(JinjaError::new(JinjaErrorKind::Depth, "values are nested too deeply"));
        }
        let next: NextFunction = Box::new(next);
        Ok(JinjaValue::Iterator(Rc::new(Self { next: RefCell::new(Some(next)), depth })))
    }

    /// Nesting depth of the value from which the iterator takes its items.
    pub(crate) fn depth(&self) -> u16 {
        self.depth
    }

    fn next(&self, evaluator: &mut TemplateEvaluator) -> JinjaResult<Option<JinjaValue>> {
        // The function is taken out of the cell while it runs, because it may itself take items of this
        // iterator.
        let Some(mut next) = self.next.borrow_mut().take() else { return Ok(None) };
        let item = evaluator.nested(|evaluator| next(evaluator))?;
        if item.is_some() {
            *self.next.borrow_mut() = Some(next);
        }
        Ok(item)
    }
}

/// Iteration over a value, with its current position.
#[derive(Debug)]
pub(crate) enum ValueIterator {
    /// Items of a list or a tuple.
    Sequence(Rc<JinjaSequence>, usize),
    /// Items of a list or a tuple in reverse order, with the number of items left.
    Reversed(Rc<JinjaSequence>, usize),
    /// Keys, values or items of a dict.
    Entries(Rc<DictValue>, DictViewKind, usize),
    /// Characters of a string, from a byte position.
    Characters(Arc<str>, usize),
    /// Bytes.
    Bytes(Rc<[u8]>, usize),
    /// Integers of a range.
    Range(RangeValue, u64),
    /// Items of an iterator.
    Iterator(Rc<IteratorValue>),
    /// Items of another loop, taken through its `loop` variable.
    Loop(Rc<super::loop_state::LoopValue>),
}

impl ValueIterator {
    /// Begins an iteration over `value`.
    ///
    /// Errors: the value is not iterable.
    pub(crate) fn new(value: &JinjaValue) -> JinjaResult<Self> {
        Ok(match value {
            JinjaValue::Undefined(_) => Self::Bytes(Rc::from([]), 0),
            JinjaValue::List(items) | JinjaValue::Tuple(items) => {
                Self::Sequence(Rc::clone(items), 0)
            }
            JinjaValue::Dict(dict) => Self::Entries(Rc::clone(dict), DictViewKind::Keys, 0),
            JinjaValue::View(view) => Self::Entries(Rc::clone(&view.dict), view.kind, 0),
            JinjaValue::Str(text) | JinjaValue::Markup(text) => {
                Self::Characters(Arc::clone(text), 0)
            }
            JinjaValue::Bytes(bytes) => Self::Bytes(Rc::clone(bytes), 0),
            JinjaValue::Range(range) => Self::Range(*range, 0),
            JinjaValue::Iterator(iterator) => Self::Iterator(Rc::clone(iterator)),
            JinjaValue::Loop(state) => Self::Loop(Rc::clone(state)),
            _ => {
                let message = format!("'{}' object is not iterable", value.type_name());
                return Err(JinjaError::type_error(message));
            }
        })
    }

    /// Returns the next item.
    ///
    /// Errors: computing the item fails, or a limit is exceeded.
    pub(crate) fn next(
        &mut self,
        evaluator: &mut TemplateEvaluator,
    ) -> JinjaResult<Option<JinjaValue>> {
        evaluator.spend(1)?;
        Ok(match self {
            Self::Sequence(items, at) => {
                *at += 1;
                items.items.get(*at - 1).cloned()
            }
            Self::Reversed(items, left) => {
                if *left == 0 {
                    return Ok(None);
                }
                *left -= 1;
                items.items.get(*left).cloned()
            }
            Self::Entries(dict, kind, at) => {
                *at += 1;
                let Some(entry) = dict.entries().get(*at - 1) else { return Ok(None) };
                Some(match kind {
                    DictViewKind::Keys => entry.key.clone(),
                    DictViewKind::Values => entry.value.clone(),
                    DictViewKind::Items => {
                        JinjaValue::tuple(vec![entry.key.clone(), entry.value.clone()])?
                    }
                })
            }
            Self::Characters(text, at) => {
                let Some(c) = text[*at..].chars().next() else { return Ok(None) };
                *at += c.len_utf8();
                Some(JinjaValue::text(c.encode_utf8(&mut [0; 4]).to_owned()))
            }
            Self::Bytes(bytes, at) => {
                *at += 1;
                bytes.get(*at - 1).map(|byte| JinjaValue::Int(i64::from(*byte)))
            }
            Self::Range(range, at) => {
                if *at >= range.len() {
                    return Ok(None);
                }
                *at += 1;
                Some(JinjaValue::Int(range.at(*at - 1)))
            }
            Self::Iterator(iterator) => iterator.next(evaluator)?,
            Self::Loop(state) => {
                let state = Rc::clone(state);
                let Some(item) = state.advance(evaluator)? else { return Ok(None) };
                Some(JinjaValue::tuple(vec![item, JinjaValue::Loop(state)])?)
            }
        })
    }
}

/// Number of items of a value, as Python's `len` returns it; `None` if the value has no length.
pub(crate) fn length(value: &JinjaValue) -> Option<usize> {
    Some(match value {
        JinjaValue::Undefined(_) => 0,
        JinjaValue::Str(text) | JinjaValue::Markup(text) => {
            if text.is_ascii() {
                text.len()
            } else {
                text.chars().count()
            }
        }
        JinjaValue::Bytes(bytes) => bytes.len(),
        JinjaValue::List(items) | JinjaValue::Tuple(items) => items.items.len(),
        JinjaValue::Dict(dict) => dict.len(),
        JinjaValue::View(view) => view.dict.len(),
        JinjaValue::Range(range) => range.len() as usize,
        _ => return None,
    })
}

impl TemplateEvaluator {
    /// Returns all items of a value.
    ///
    /// Errors: the value is not iterable, computing an item fails, or a limit is exceeded.
    pub(crate) fn collect(&mut self, value: &JinjaValue) -> JinjaResult<Vec<JinjaValue>> {
        if let JinjaValue::List(items) | JinjaValue::Tuple(items) = value {
            self.charge(items.items.len() * size_of::<JinjaValue>())?;
            return Ok(items.items.clone());
        }
        let mut iterator = ValueIterator::new(value)?;
        let mut items = Vec::new();
        while let Some(item) = iterator.next(self)? {
            self.charge(size_of::<JinjaValue>())?;
            items.push(item);
        }
        Ok(items)
    }

    /// Returns the number of items of a value.
    ///
    /// Errors: the value has no length.
    pub(crate) fn length(&mut self, value: &JinjaValue) -> JinjaResult<usize> {
        if let JinjaValue::Loop(state) = value {
            return Rc::clone(state).length(self);
        }
        length(value).ok_or_else(|| {
            JinjaError::type_error(format!("object of type '{}' has no len()", value.type_name()))
        })
    }
}
