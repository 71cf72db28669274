//! Execution of statements.

use super::ast::{ForNode, IfBranch, JinjaStatement, MacroNode, StatementNode, WithVariable};
use super::error::{JinjaError, JinjaResult};
use super::evaluator::TemplateEvaluator;
use super::iteration::ValueIterator;
use super::loop_state::{FilteredLoopItems, LoopValue};
use super::scope::{ScopeFrame, VariableScope};
use super::value::{JinjaValue, MacroValue};
use std::rc::Rc;
use std::sync::Arc;

/// Point at which execution continues after a statement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ControlFlow {
    /// Continue with the next statement.
    Next,
    /// Continue after the loop.
    Break,
    /// Continue with the next iteration of the loop.
    Continue,
}

impl TemplateEvaluator {
    /// Executes statements.
    ///
    /// Errors: a statement fails, or a limit is exceeded.
    pub(crate) fn execute(
        &mut self,
        statements: &[StatementNode],
        scope: &VariableScope,
    ) -> JinjaResult<ControlFlow> {
        for node in statements {
            self.spend(1)?;
            let flow = match &node.statement {
                JinjaStatement::Data(text) => self.write(text).map(|()| ControlFlow::Next),
                statement => self.nested(|evaluator| evaluator.execute_one(statement, scope)),
            };
            match flow {
                Ok(ControlFlow::Next) => {}
                Ok(flow) => return Ok(flow),
                Err(error) => return Err(error.at_line(node.line)),
            }
        }
        Ok(ControlFlow::Next)
    }

    fn execute_one(
        &mut self,
        statement: &JinjaStatement,
        scope: &VariableScope,
    ) -> JinjaResult<ControlFlow> {
        match statement {
            JinjaStatement::Data(text) => self.write(text)?,
            JinjaStatement::Print(expression) => {
                let value = self.evaluate(expression, scope)?;
                self.print(&value)?;
            }
            JinjaStatement::Set(target, expression) => {
                let value = self.evaluate(expression, scope)?;
                self.assign(target, value, scope)?;
            }
            JinjaStatement::If(branches, otherwise) => {
                return self.execute_if(branches, otherwise, scope);
            }
            JinjaStatement::For(node) => {
                let iterable = self.evaluate(&node.iterable, scope)?;
                if node.is_recursive {
                    let text = self.render_loop(node, &iterable, scope, 0)?;
                    self.write(&text)?;
                } else {
                    return self.execute_for(node, &iterable, scope, 0);
                }
            }
            JinjaStatement::SetBlock(target, filter, body) => {
                return self.execute_set_block(target, filter.as_ref(), body, scope);
            }
            JinjaStatement::Macro(id, node) => {
                let definition = self.define(node, scope);
                self.set_variable(*id, definition, scope);
            }
            JinjaStatement::CallBlock(node, call) => {
                let caller = self.define(node, scope);
                let value = self.evaluate_call(call, Some(caller), scope)?;
                self.print(&value)?;
            }
            JinjaStatement::Generation(node) => {
                let definition = self.define(node, scope);
                let value = self.call(&definition, super::arguments::CallArguments::default())?;
                self.print(&value)?;
            }
            JinjaStatement::FilterBlock(filter, body) => {
                return self.execute_filter_block(filter, body, scope);
            }
            JinjaStatement::With(variables, body) => {
                return self.execute_with(variables, body, scope);
            }
            JinjaStatement::Block(block) => self.execute_block(block, scope)?,
            JinjaStatement::Autoescape(value, body) => {
                if self.evaluate(value, scope)?.is_true() {
                    return Err(JinjaError::unsupported("automatic escaping is unsupported"));
                }
                return self.execute(body, &Some(ScopeFrame::new(scope)));
            }
            JinjaStatement::Break => return Ok(ControlFlow::Break),
            JinjaStatement::Continue => return Ok(ControlFlow::Continue),
            JinjaStatement::LoadTemplate(name) => {
                self.evaluate(name, scope)?;
                return Err(JinjaError::type_error("no loader for this environment specified"));
            }
        }
        Ok(ControlFlow::Next)
    }

    fn define(&mut self, node: &Arc<MacroNode>, scope: &VariableScope) -> JinjaValue {
        let scope = self.capture_scope(scope);
        let special = self.special();
        JinjaValue::Macro(Rc::new(MacroValue { node: Arc::clone(node), scope, special }))
    }

    fn execute_if(
        &mut self,
        branches: &[IfBranch],
        otherwise: &[StatementNode],
        scope: &VariableScope,
    ) -> JinjaResult<ControlFlow> {
        for branch in branches {
            if self.evaluate(&branch.test, scope)?.is_true() {
                return self.execute(&branch.body, scope);
            }
        }
        self.execute(otherwise, scope)
    }

    /// Executes a loop over `iterable`; `depth` is the nesting depth of a recursive loop.
    fn execute_for(
        &mut self,
        node: &Arc<ForNode>,
        iterable: &JinjaValue,
        scope: &VariableScope,
        depth: usize,
    ) -> JinjaResult<ControlFlow> {
        let mut items = if node.uses_loop {
            ForLoopIterator::Loop(LoopValue::new(node, iterable, scope, depth)?)
        } else if node.test.is_some() {
            ForLoopIterator::Items(FilteredLoopItems::new(node, iterable, scope)?)
        } else {
            ForLoopIterator::Plain(ValueIterator::new(iterable)?)
        };
        let mut reached_end = false;
        let mut frame = ScopeFrame::new(scope);
        while let Some(item) = items.next(self)? {
            if Rc::strong_count(&frame) > 1 {
                frame = ScopeFrame::new(scope);
            } else {
                frame.clear();
            }
            let inner = Some(Rc::clone(&frame));
            if let ForLoopIterator::Loop(state) = &items {
                frame.set(self.special().loop_object, JinjaValue::Loop(Rc::clone(state)));
            }
            self.assign(&node.target, item, &inner)?;
            match self.execute(&node.body, &inner)? {
                ControlFlow::Next => reached_end = true,
                ControlFlow::Continue => {}
                ControlFlow::Break => break,
            }
        }
        // As in Jinja2, an iteration ended by `break` or `continue` does not count as having reached the end
        // of the body.
        if reached_end || node.otherwise.is_empty() {
            return Ok(ControlFlow::Next);
        }
        self.execute(&node.otherwise, &Some(ScopeFrame::new(scope)))
    }

    /// Returns the text that a loop over `iterable` renders.
    ///
    /// Errors: the loop fails, or a limit is exceeded.
    pub(crate) fn render_loop(
        &mut self,
        node: &Arc<ForNode>,
        iterable: &JinjaValue,
        scope: &VariableScope,
        depth: usize,
    ) -> JinjaResult<String> {
        self.capture(|evaluator| evaluator.execute_for(node, iterable, scope, depth))
    }

    fn execute_set_block(
        &mut self,
        target: &super::ast::AssignTarget,
        filter: Option<&super::ast::ExpressionNode>,
        body: &[StatementNode],
        scope: &VariableScope,
    ) -> JinjaResult<ControlFlow> {
        let inner = Some(ScopeFrame::new(scope));
        let mut flow = ControlFlow::Next;
        let text = self.capture(|evaluator| {
            flow = evaluator.execute(body, &inner)?;
            Ok(flow)
        })?;
        if flow != ControlFlow::Next {
            return Ok(flow);
        }
        let mut value = JinjaValue::text(text);
        if let Some(super::ast::ExpressionNode::Filter(filter)) = filter {
            value = self.evaluate_filter(filter, Some(value), &inner)?;
        }
        self.assign(target, value, scope)?;
        Ok(flow)
    }

    fn execute_filter_block(
        &mut self,
        filter: &super::ast::ExpressionNode,
        body: &[StatementNode],
        scope: &VariableScope,
    ) -> JinjaResult<ControlFlow> {
        let inner = Some(ScopeFrame::new(scope));
        let mut flow = ControlFlow::Next;
        let text = self.capture(|evaluator| {
            flow = evaluator.execute(body, &inner)?;
            Ok(flow)
        })?;
        if flow != ControlFlow::Next {
            return Ok(flow);
        }
        let value = match filter {
            super::ast::ExpressionNode::Filter(filter) => {
                self.evaluate_filter(filter, Some(JinjaValue::text(text)), &inner)?
            }
            _ => JinjaValue::text(text),
        };
        self.print(&value)?;
        Ok(flow)
    }

    fn execute_with(
        &mut self,
        variables: &[WithVariable],
        body: &[StatementNode],
        scope: &VariableScope,
    ) -> JinjaResult<ControlFlow> {
        let inner = Some(ScopeFrame::new(scope));
        for variable in variables {
            let value = self.evaluate(&variable.value, scope)?;
            self.assign(&variable.target, value, &inner)?;
        }
        self.execute(body, &inner)
    }

    /// Executes a named block. The block can read the variables of the template; a `scoped` block can also
    /// read the variables of the enclosing scope.
    fn execute_block(
        &mut self,
        block: &super::ast::BlockNode,
        scope: &VariableScope,
    ) -> JinjaResult<()> {
        if block.is_required {
            let message = format!("Required block '{}' not found", block.name);
            return Err(JinjaError::runtime(message));
        }
        let outer = if block.is_scoped { scope.clone() } else { None };
        self.execute(&block.body, &Some(ScopeFrame::new(&outer)))?;
        Ok(())
    }
}

/// Iterator over the items of a `for` loop. The simplest variant that supports the features of the loop is
/// used.
enum ForLoopIterator {
    /// All items of a value.
    Plain(ValueIterator),
    /// Items that satisfy a condition.
    Items(FilteredLoopItems),
    /// Items of a loop whose body uses the variable `loop`.
    Loop(Rc<LoopValue>),
}

impl ForLoopIterator {
    fn next(&mut self, evaluator: &mut TemplateEvaluator) -> JinjaResult<Option<JinjaValue>> {
        match self {
            Self::Plain(iterator) => iterator.next(evaluator),
            Self::Items(items) => items.next(evaluator),
            Self::Loop(state) => state.advance(evaluator),
        }
    }
}
