//! Variable scopes. The variables of the template itself are stored in the evaluator. Each loop iteration,
//! macro call and scoped block has a separate scope with a reference to its enclosing scope.

use super::ast::NameId;
use super::value::JinjaValue;
use std::cell::RefCell;
use std::rc::Rc;

/// Scope of a statement; `None` is the scope of the template itself.
pub(crate) type VariableScope = Option<Rc<ScopeFrame>>;

/// Variables of one scope.
#[derive(Debug)]
pub(crate) struct ScopeFrame {
    variables: RefCell<Vec<ScopeVariable>>,
    parent: VariableScope,
}

/// A variable with its value.
#[derive(Debug)]
struct ScopeVariable {
    id: NameId,
    value: JinjaValue,
}

impl ScopeFrame {
    /// Creates an empty scope inside of `parent`.
    pub(crate) fn new(parent: &VariableScope) -> Rc<Self> {
        Rc::new(Self { variables: RefCell::new(Vec::new()), parent: parent.clone() })
    }

    /// Sets a variable of this scope.
    pub(crate) fn set(&self, id: NameId, value: JinjaValue) {
        let mut variables = self.variables.borrow_mut();
        match variables.iter_mut().find(|variable| variable.id == id) {
            Some(variable) => variable.value = value,
            None => variables.push(ScopeVariable { id, value }),
        }
    }

    fn get(&self, id: NameId) -> Option<JinjaValue> {
        let variables = self.variables.borrow();
        variables.iter().find(|variable| variable.id == id).map(|variable| variable.value.clone())
    }

    /// Removes all variables.
    pub(crate) fn clear(&self) {
        // The values are dropped after the borrow ends, because dropping a value may drop other scopes and
        // their values.
        let variables = std::mem::take(&mut *self.variables.borrow_mut());
        drop(variables);
    }
}

/// Returns the value of a variable from `scope` or its enclosing scopes, except for the scope of the template
/// itself.
pub(crate) fn find_variable(scope: &VariableScope, id: NameId) -> Option<JinjaValue> {
    let mut frame = scope.as_ref();
    while let Some(current) = frame {
        if let Some(value) = current.get(id) {
            return Some(value);
        }
        frame = current.parent.as_ref();
    }
    None
}
