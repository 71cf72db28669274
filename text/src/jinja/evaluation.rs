//! Evaluation of expressions.

use super::arguments::{CallArguments, KeywordArgumentValue};
use super::arithmetic::{binary, signed};
use super::ast::{
    ArgumentList, CallExpression, CompareOperand, ConditionalExpression, DictPair, ExpressionNode,
    FilterExpression, JinjaTestExpression, LiteralValue,
};
use super::comparison::compare;
use super::dict::DictValue;
use super::error::{JinjaError, JinjaResult};
use super::evaluator::TemplateEvaluator;
use super::scope::VariableScope;
use super::value::JinjaValue;
use std::rc::Rc;
use std::sync::Arc;

impl TemplateEvaluator {
    /// Evaluates an expression.
    ///
    /// Errors: the expression fails, or a limit is exceeded.
    pub(crate) fn evaluate(
        &mut self,
        expression: &ExpressionNode,
        scope: &VariableScope,
    ) -> JinjaResult<JinjaValue> {
        self.spend(1)?;
        match expression {
            ExpressionNode::Literal(literal) => Ok(literal_value(literal)),
            ExpressionNode::Name(id) => Ok(self.variable(*id, scope)),
            _ => self.nested(|evaluator| evaluator.evaluate_operation(expression, scope)),
        }
    }

    fn evaluate_operation(
        &mut self,
        expression: &ExpressionNode,
        scope: &VariableScope,
    ) -> JinjaResult<JinjaValue> {
        match expression {
            ExpressionNode::Literal(literal) => Ok(literal_value(literal)),
            ExpressionNode::Name(id) => Ok(self.variable(*id, scope)),
            ExpressionNode::List(items) => JinjaValue::list(self.evaluate_all(items, scope)?),
            ExpressionNode::Tuple(items) => JinjaValue::tuple(self.evaluate_all(items, scope)?),
            ExpressionNode::Dict(pairs) => self.evaluate_dict(pairs, scope),
            ExpressionNode::Attribute(target, name) => {
                let target = self.evaluate(target, scope)?;
                self.attribute(&target, name)
            }
            ExpressionNode::Item(target, index) => {
                let target = self.evaluate(target, scope)?;
                let index = self.evaluate(index, scope)?;
                self.item(&target, &index)
            }
            ExpressionNode::Slice(slice) => self.evaluate_slice(slice, scope),
            ExpressionNode::Call(call) => self.evaluate_call(call, None, scope),
            ExpressionNode::Filter(filter) => self.evaluate_filter(filter, None, scope),
            ExpressionNode::Test(test) => self.evaluate_test(test, scope),
            ExpressionNode::Not(value) => {
                Ok(JinjaValue::Bool(!self.evaluate(value, scope)?.is_true()))
            }
            ExpressionNode::Negative(value) => signed(&self.evaluate(value, scope)?, true),
            ExpressionNode::Positive(value) => signed(&self.evaluate(value, scope)?, false),
            ExpressionNode::Binary(operator, left, right) => {
                let left = self.evaluate(left, scope)?;
                let right = self.evaluate(right, scope)?;
                binary(self, *operator, &left, &right)
            }
            ExpressionNode::And(left, right) => {
                let left = self.evaluate(left, scope)?;
                if left.is_true() { self.evaluate(right, scope) } else { Ok(left) }
            }
            ExpressionNode::Or(left, right) => {
                let left = self.evaluate(left, scope)?;
                if left.is_true() { Ok(left) } else { self.evaluate(right, scope) }
            }
            ExpressionNode::Concat(parts) => self.evaluate_concat(parts, scope),
            ExpressionNode::Compare(first, rest) => self.evaluate_compare(first, rest, scope),
            ExpressionNode::Conditional(node) => self.evaluate_conditional(node, scope),
        }
    }

    fn evaluate_all(
        &mut self,
        expressions: &[ExpressionNode],
        scope: &VariableScope,
    ) -> JinjaResult<Vec<JinjaValue>> {
        self.charge(expressions.len() * size_of::<JinjaValue>())?;
        expressions.iter().map(|expression| self.evaluate(expression, scope)).collect()
    }

    fn evaluate_dict(
        &mut self,
        pairs: &[DictPair],
        scope: &VariableScope,
    ) -> JinjaResult<JinjaValue> {
        self.charge(pairs.len() * 64)?;
        let mut dict = DictValue::default();
        for pair in pairs {
            let key = self.evaluate(&pair.key, scope)?;
            let value = self.evaluate(&pair.value, scope)?;
            dict.insert(key, value)?;
        }
        Ok(JinjaValue::dict(dict))
    }

    fn evaluate_concat(
        &mut self,
        parts: &[ExpressionNode],
        scope: &VariableScope,
    ) -> JinjaResult<JinjaValue> {
        let values = self.evaluate_all(parts, scope)?;
        let mut text = String::new();
        for value in &values {
            let before = text.len();
            self.write_str(value, &mut text)?;
            self.charge(text.len() - before)?;
        }
        Ok(JinjaValue::text(text))
    }

    fn evaluate_compare(
        &mut self,
        first: &ExpressionNode,
        rest: &[CompareOperand],
        scope: &VariableScope,
    ) -> JinjaResult<JinjaValue> {
        let mut left = self.evaluate(first, scope)?;
        for operand in rest {
            let right = self.evaluate(&operand.value, scope)?;
            if !compare(self, operand.operator, &left, &right)? {
                return Ok(JinjaValue::Bool(false));
            }
            left = right;
        }
        Ok(JinjaValue::Bool(true))
    }

    fn evaluate_conditional(
        &mut self,
        node: &ConditionalExpression,
        scope: &VariableScope,
    ) -> JinjaResult<JinjaValue> {
        if self.evaluate(&node.test, scope)?.is_true() {
            return self.evaluate(&node.then, scope);
        }
        match &node.otherwise {
            Some(otherwise) => self.evaluate(otherwise, scope),
            None => Ok(JinjaValue::undefined(format!(
                "the inline if-expression on line {} evaluated to false and no else section was defined.",
                node.line
            ))),
        }
    }

    /// Evaluates the arguments of a call.
    pub(crate) fn arguments(
        &mut self,
        list: &ArgumentList,
        scope: &VariableScope,
    ) -> JinjaResult<CallArguments> {
        let mut arguments = CallArguments::default();
        if !list.positional.is_empty() {
            arguments.positional = self.evaluate_all(&list.positional, scope)?;
        }
        for argument in &list.keyword {
            let value = self.evaluate(&argument.value, scope)?;
            arguments
                .keyword
                .push(KeywordArgumentValue { name: Arc::clone(&argument.name), value });
        }
        if let Some(spread) = &list.spread {
            let values = self.evaluate(spread, scope)?;
            arguments.positional.extend(self.collect(&values)?);
        }
        if let Some(spread) = &list.spread_keyword {
            let values = self.evaluate(spread, scope)?;
            arguments.spread_keyword(&values)?;
        }
        Ok(arguments)
    }

    /// Evaluates a filter; `text` is the rendered text of the enclosing filter block, if any.
    pub(crate) fn evaluate_filter(
        &mut self,
        filter: &FilterExpression,
        text: Option<JinjaValue>,
        scope: &VariableScope,
    ) -> JinjaResult<JinjaValue> {
        let target = match (&filter.target, text) {
            // The rendered text of a filter block is the input of the innermost filter.
            (Some(ExpressionNode::Filter(inner)), Some(text)) => {
                self.evaluate_filter(inner, Some(text), scope)?
            }
            (None, Some(text)) => text,
            (Some(target), _) => self.evaluate(target, scope)?,
            (None, None) => JinjaValue::text(""),
        };
        let arguments = self.arguments(&filter.arguments, scope)?;
        let Some(function) = filter.function else {
            return Err(JinjaError::runtime(format!("No filter named '{}' found.", filter.name)));
        };
        function(self, &target, arguments)
    }

    fn evaluate_test(
        &mut self,
        test: &JinjaTestExpression,
        scope: &VariableScope,
    ) -> JinjaResult<JinjaValue> {
        let target = self.evaluate(&test.target, scope)?;
        let arguments = self.arguments(&test.arguments, scope)?;
        let Some(function) = test.function else {
            return Err(JinjaError::runtime(format!("No test named '{}' found.", test.name)));
        };
        Ok(JinjaValue::Bool(function(self, &target, arguments)?))
    }

    /// Evaluates a call; `caller` is the macro made from the body of a call block.
    pub(crate) fn evaluate_call(
        &mut self,
        call: &CallExpression,
        caller: Option<JinjaValue>,
        scope: &VariableScope,
    ) -> JinjaResult<JinjaValue> {
        if let ExpressionNode::Attribute(target, name) = &call.target {
            let target = self.evaluate(target, scope)?;
            if let Some(method) = super::methods::find(&target, name) {
                let arguments = self.call_arguments(call, caller, scope)?;
                return method(self, &target, arguments);
            }
            let callee = self.attribute(&target, name)?;
            let arguments = self.call_arguments(call, caller, scope)?;
            return self.call(&callee, arguments);
        }
        let callee = self.evaluate(&call.target, scope)?;
        let arguments = self.call_arguments(call, caller, scope)?;
        self.call(&callee, arguments)
    }

    fn call_arguments(
        &mut self,
        call: &CallExpression,
        caller: Option<JinjaValue>,
        scope: &VariableScope,
    ) -> JinjaResult<CallArguments> {
        let mut arguments = self.arguments(&call.arguments, scope)?;
        if let Some(caller) = caller {
            arguments.push_keyword(Arc::from("caller"), caller)?;
        }
        Ok(arguments)
    }
}

fn literal_value(literal: &LiteralValue) -> JinjaValue {
    match literal {
        LiteralValue::None => JinjaValue::None,
        LiteralValue::Bool(value) => JinjaValue::Bool(*value),
        LiteralValue::Int(number) => JinjaValue::Int(*number),
        LiteralValue::Big(number) => JinjaValue::Big(Rc::new((**number).clone())),
        LiteralValue::Float(number) => JinjaValue::Float(*number),
        LiteralValue::Text(text) => JinjaValue::Str(Arc::clone(text)),
    }
}
