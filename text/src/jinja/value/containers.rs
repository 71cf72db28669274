//! Sequences, ranges and other values with contents.

use super::super::ast::{MacroNode, NameId};
use super::super::dict::DictValue;
use super::super::error::{JinjaError, JinjaErrorKind, JinjaResult};
use super::super::methods::MethodFunction;
use super::super::scope::VariableScope;
use super::{JinjaValue, VALUE_DEPTH_MAX};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

/// Items of a list or a tuple.
#[derive(Debug)]
pub(crate) struct JinjaSequence {
    /// Items.
    pub(crate) items: Vec<JinjaValue>,
    /// Nesting of the items.
    pub(super) depth: u16,
    /// Whether this is a group of the filter `groupby`, whose items have the names `grouper` and `list`.
    pub(crate) is_group: bool,
}

/// Range of integers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RangeValue {
    /// First integer.
    pub(crate) start: i64,
    /// Exclusive end of the range.
    pub(crate) stop: i64,
    /// Difference of successive integers.
    pub(crate) step: i64,
}

impl RangeValue {
    /// Number of integers in the range.
    pub(crate) fn len(self) -> u64 {
        let (start, stop, step) =
            (i128::from(self.start), i128::from(self.stop), i128::from(self.step));
        let span = if step > 0 { stop - start } else { start - stop };
        if span <= 0 { 0 } else { ((span - 1) / step.abs() + 1) as u64 }
    }

    /// Returns the integer at `index`, which is below the length.
    pub(crate) fn at(self, index: u64) -> i64 {
        (i128::from(self.start) + i128::from(self.step) * i128::from(index)) as i64
    }

    /// Returns the index of `number` in the range; `None` if the range does not contain `number`.
    pub(crate) fn position(self, number: i64) -> Option<u64> {
        let distance = i128::from(number) - i128::from(self.start);
        let step = i128::from(self.step);
        let index = distance / step;
        (distance % step == 0 && index >= 0 && index < i128::from(self.len()))
            .then_some(index as u64)
    }
}

/// Namespace: the only value whose attributes a template can assign.
#[derive(Debug)]
pub(crate) struct NamespaceValue {
    /// Attributes.
    pub(crate) attributes: RefCell<DictValue>,
}

/// Macro with its defining scope.
#[derive(Debug)]
pub(crate) struct MacroValue {
    /// Parameters and statements.
    pub(crate) node: Arc<MacroNode>,
    /// Scope of the definition.
    pub(crate) scope: VariableScope,
    /// Name ids of the special parameters `caller`, `kwargs` and `varargs`.
    pub(crate) special: SpecialVariableIds,
}

/// Name ids of the special variables `caller`, `kwargs`, `varargs` and `loop`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SpecialVariableIds {
    /// `caller`
    pub(crate) caller: NameId,
    /// `kwargs`
    pub(crate) kwargs: NameId,
    /// `varargs`
    pub(crate) varargs: NameId,
    /// `loop`
    pub(crate) loop_object: NameId,
}

/// Object that the template function `cycler` returns: it yields its items in rotation.
#[derive(Debug)]
pub(crate) struct CyclerValue {
    /// Items, at least one.
    pub(crate) items: Rc<JinjaSequence>,
    /// Index of the item that the cycler returns as its current item.
    pub(crate) position: Cell<usize>,
}

/// Object that the template function `joiner` returns: it yields a separator on each call except the first.
#[derive(Debug)]
pub(crate) struct JoinerValue {
    /// Separator, which every call except the first returns.
    pub(crate) separator: JinjaValue,
    /// Whether the joiner has been called.
    pub(crate) used: Cell<bool>,
}

/// Method of a value.
#[derive(Debug)]
pub(crate) struct BoundMethod {
    /// Value.
    pub(crate) receiver: JinjaValue,
    /// Function.
    pub(crate) function: MethodFunction,
}

impl JinjaSequence {
    /// Creates a sequence.
    ///
    /// Errors: the items are nested too deeply.
    pub(crate) fn new(items: Vec<JinjaValue>) -> JinjaResult<Rc<Self>> {
        let depth = depth_around(items.iter())?;
        Ok(Rc::new(Self { items, depth, is_group: false }))
    }

    /// Creates a group of the filter `groupby`.
    pub(crate) fn group(grouper: JinjaValue, list: JinjaValue) -> JinjaResult<Rc<Self>> {
        let items = vec![grouper, list];
        let depth = depth_around(items.iter())?;
        Ok(Rc::new(Self { items, depth, is_group: true }))
    }
}

/// Returns the nesting depth of a container of `items`.
///
/// Errors: the depth exceeds its maximum.
pub(crate) fn depth_around<'a>(items: impl Iterator<Item = &'a JinjaValue>) -> JinjaResult<u16> {
    let depth = items.map(JinjaValue::depth).max().unwrap_or(0) + 1;
    if depth > VALUE_DEPTH_MAX {
        return Err(JinjaError::new(JinjaErrorKind::Depth, "values are nested too deeply"));
    }
    Ok(depth)
}
