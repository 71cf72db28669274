//! State of a `for` loop, which a template reads through the variable `loop`.

use super::ast::ForNode;
use super::error::JinjaResult;
use super::evaluator::TemplateEvaluator;
use super::iteration::{ValueIterator, length};
use super::scope::{ScopeFrame, VariableScope};
use super::value::JinjaValue;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

/// Iterator over the items of a `for` loop that satisfy the loop's `if` condition.
#[derive(Debug)]
pub(crate) struct FilteredLoopItems {
    iterator: ValueIterator,
    node: Arc<ForNode>,
    scope: VariableScope,
    /// Whether the loop's `if` condition must still be evaluated for the items.
    is_tested: bool,
}

impl FilteredLoopItems {
    /// Begins an iteration over `iterable` in the loop `node`.
    pub(crate) fn new(
        node: &Arc<ForNode>,
        iterable: &JinjaValue,
        scope: &VariableScope,
    ) -> JinjaResult<Self> {
        let iterator = ValueIterator::new(iterable)?;
        Ok(Self {
            iterator,
            node: Arc::clone(node),
            scope: scope.clone(),
            is_tested: node.test.is_some(),
        })
    }

    /// Returns the next item that satisfies the condition.
    pub(crate) fn next(
        &mut self,
        evaluator: &mut TemplateEvaluator,
    ) -> JinjaResult<Option<JinjaValue>> {
        let node = Arc::clone(&self.node);
        while let Some(item) = self.iterator.next(evaluator)? {
            let Some(test) = node.test.as_ref().filter(|_| self.is_tested) else {
                return Ok(Some(item));
            };
            let scope = Some(ScopeFrame::new(&self.scope));
            evaluator.assign(&node.target, item.clone(), &scope)?;
            if evaluator.evaluate(test, &scope)?.is_true() {
                return Ok(Some(item));
            }
        }
        Ok(None)
    }
}

/// Value of the variable `loop` in the body of a `for` loop, with the state of the iteration.
#[derive(Debug)]
pub(crate) struct LoopValue {
    items: RefCell<Option<FilteredLoopItems>>,
    /// Number of items before the current one; -1 before the first iteration.
    index0: Cell<i64>,
    length: Cell<Option<usize>>,
    position: RefCell<AdjacentLoopItems>,
    /// Arguments of the last call of `loop.changed`.
    last_changed: RefCell<Option<JinjaValue>>,
    /// Nesting depth of a recursive loop, from 0.
    pub(crate) depth0: usize,
    /// Loop node that `loop(…)` renders recursively, in the scope `scope`; `None` if the loop is not
    /// recursive.
    pub(crate) recursive: Option<Arc<ForNode>>,
    /// Scope of the loop.
    pub(crate) scope: VariableScope,
    depth: u16,
}

/// Previous and next item of the current item of a loop.
#[derive(Debug, Default)]
struct AdjacentLoopItems {
    before: Option<JinjaValue>,
    current: Option<JinjaValue>,
    /// Next item, if it has already been taken from the iterated value.
    after: Option<JinjaValue>,
}

impl LoopValue {
    /// Creates the state of the loop `node` over `iterable`.
    pub(crate) fn new(
        node: &Arc<ForNode>,
        iterable: &JinjaValue,
        scope: &VariableScope,
        depth0: usize,
    ) -> JinjaResult<Rc<Self>> {
        let length = if node.test.is_none() { length(iterable) } else { None };
        Ok(Rc::new(Self {
            items: RefCell::new(Some(FilteredLoopItems::new(node, iterable, scope)?)),
            index0: Cell::new(-1),
            length: Cell::new(length),
            position: RefCell::default(),
            last_changed: RefCell::new(None),
            depth0,
            recursive: node.is_recursive.then(|| Arc::clone(node)),
            scope: scope.clone(),
            depth: super::value::depth_around(std::iter::once(iterable))?,
        }))
    }

    /// Nesting depth of the iterated value.
    pub(crate) fn depth(&self) -> u16 {
        self.depth
    }

    /// Number of items before the current one.
    pub(crate) fn index0(&self) -> i64 {
        self.index0.get()
    }

    /// Takes the next item from the iterated value.
    fn take(&self, evaluator: &mut TemplateEvaluator) -> JinjaResult<Option<JinjaValue>> {
        let Some(mut items) = self.items.borrow_mut().take() else { return Ok(None) };
        let item = items.next(evaluator)?;
        *self.items.borrow_mut() = Some(items);
        Ok(item)
    }

    /// Moves to the next item.
    pub(crate) fn advance(
        &self,
        evaluator: &mut TemplateEvaluator,
    ) -> JinjaResult<Option<JinjaValue>> {
        let peeked = self.position.borrow_mut().after.take();
        let item = match peeked {
            Some(item) => Some(item),
            None => self.take(evaluator)?,
        };
        if let Some(item) = &item {
            self.index0.set(self.index0.get() + 1);
            let mut position = self.position.borrow_mut();
            position.before = position.current.take();
            position.current = Some(item.clone());
        }
        Ok(item)
    }

    /// Returns the next item without moving to it.
    pub(crate) fn peek(
        &self,
        evaluator: &mut TemplateEvaluator,
    ) -> JinjaResult<Option<JinjaValue>> {
        if let Some(item) = &self.position.borrow().after {
            return Ok(Some(item.clone()));
        }
        let item = self.take(evaluator)?;
        self.position.borrow_mut().after.clone_from(&item);
        Ok(item)
    }

    /// Returns the previous item; `None` in the first iteration.
    pub(crate) fn previous(&self) -> Option<JinjaValue> {
        self.position.borrow().before.clone()
    }

    /// Returns the number of items. To count the items of an iterator, all of them are taken.
    pub(crate) fn length(&self, evaluator: &mut TemplateEvaluator) -> JinjaResult<usize> {
        if let Some(length) = self.length.get() {
            return Ok(length);
        }
        let mut rest = Vec::new();
        while let Some(item) = self.take(evaluator)? {
            evaluator.charge(size_of::<JinjaValue>())?;
            rest.push(item);
        }
        let peeked = self.position.borrow().after.is_some();
        let length = rest.len() + (self.index0.get() + 1) as usize + usize::from(peeked);
        self.length.set(Some(length));
        let rest = JinjaValue::list(rest)?;
        if let Some(items) = self.items.borrow_mut().as_mut() {
            items.iterator = ValueIterator::new(&rest)?;
            items.is_tested = false;
        }
        Ok(length)
    }

    /// Implements `loop.changed`: whether `values` differ from the arguments of the previous call.
    pub(crate) fn changed(
        &self,
        evaluator: &mut TemplateEvaluator,
        values: JinjaValue,
    ) -> JinjaResult<bool> {
        let last = self.last_changed.borrow_mut().take();
        let changed = match &last {
            Some(last) => !super::comparison::equal(evaluator, last, &values)?,
            None => true,
        };
        *self.last_changed.borrow_mut() = Some(values);
        Ok(changed)
    }
}
