//! State of a rendering, its limits, and the evaluation of expressions.

use super::TemplateCode;
use super::arguments::CallArguments;
use super::arithmetic::{binary, signed};
use super::ast::{
    ArgumentList, AssignTarget, BlockNode, CallExpression, CompareOperand, ConditionalExpression,
    Expression, FilterExpression, LiteralValue, NameId, TestExpression,
};
use super::comparison::compare;
use super::dict::DictValue;
use super::error::{JinjaError, JinjaErrorKind, JinjaResult};
use super::iteration::ValueIterator;
use super::scope::{ScopeFrame, VariableScope, find_variable};
use super::value::{JinjaValue, NamespaceValue, SpecialIds, UndefinedValue};
use std::rc::Rc;
use std::sync::Arc;

/// Maximum nesting of expressions, statements and calls in a rendering, so that none exhausts the stack.
const DEPTH_MAX: u32 = 600;

/// Number of bytes that an instruction may process.
const BYTES_PER_INSTRUCTION: usize = 256;

/// Limits of a rendering.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RenderLimits {
    /// Maximum number of instructions.
    pub(crate) instructions: u64,
    /// Maximum size of the rendered text in bytes.
    pub(crate) output_bytes: usize,
    /// Maximum size in bytes of all values that the template creates.
    pub(crate) value_bytes: usize,
}

/// State of a rendering.
pub(crate) struct TemplateEvaluator {
    code: Arc<TemplateCode>,
    /// Variables of the template.
    slots: Vec<Option<JinjaValue>>,
    /// Rendered text, and the texts of the enclosing macros and blocks.
    buffers: Vec<String>,
    limits: RenderLimits,
    /// Instructions left.
    fuel: u64,
    /// Bytes of values left.
    bytes_left: usize,
    depth: u32,
    special: SpecialIds,
    /// Formats the present time.
    strftime_now: fn(&str) -> String,
    /// All namespaces, which are emptied at the end: one may contain itself.
    namespaces: Vec<Rc<NamespaceValue>>,
    /// Scopes of macros, which are emptied at the end: one may contain the macro.
    captured: Vec<Rc<ScopeFrame>>,
}

impl TemplateEvaluator {
    /// Creates the state of a rendering; `slots` has the values of the template's names.
    pub(crate) fn new(
        code: &Arc<TemplateCode>,
        slots: Vec<Option<JinjaValue>>,
        limits: RenderLimits,
        strftime_now: fn(&str) -> String,
    ) -> Self {
        Self {
            code: Arc::clone(code),
            slots,
            buffers: Vec::new(),
            limits,
            fuel: limits.instructions,
            bytes_left: limits.value_bytes,
            depth: 0,
            special: code.special,
            strftime_now,
            namespaces: Vec::new(),
            captured: Vec::new(),
        }
    }

    /// Renders the template.
    ///
    /// Errors: the template fails, or a limit is exceeded.
    pub(crate) fn render(&mut self) -> JinjaResult<String> {
        let code = Arc::clone(&self.code);
        let rendered = self.capture(|evaluator| evaluator.execute(&code.body, &None));
        self.slots.clear();
        for scope in self.captured.drain(..) {
            scope.clear();
        }
        for namespace in self.namespaces.drain(..) {
            let attributes = namespace.attributes.borrow_mut().take();
            drop(attributes);
        }
        rendered
    }

    /// Counts instructions.
    ///
    /// Errors: no instruction is left.
    pub(crate) fn spend(&mut self, instructions: u64) -> JinjaResult<()> {
        match self.fuel.checked_sub(instructions) {
            Some(fuel) => {
                self.fuel = fuel;
                Ok(())
            }
            None => Err(JinjaError::new(JinjaErrorKind::Fuel, "too many instructions")),
        }
    }

    /// Counts the instructions of processing `bytes` bytes.
    ///
    /// Errors: no instruction is left.
    pub(crate) fn spend_bytes(&mut self, bytes: usize) -> JinjaResult<()> {
        self.spend((bytes / BYTES_PER_INSTRUCTION) as u64)
    }

    /// Counts the bytes of a new value.
    ///
    /// Errors: the values of the template exceed their maximum size.
    pub(crate) fn charge(&mut self, bytes: usize) -> JinjaResult<()> {
        match self.bytes_left.checked_sub(bytes) {
            Some(left) => {
                self.bytes_left = left;
                Ok(())
            }
            None => {
                let max = self.limits.value_bytes;
                let message = format!("the values of the template exceed {max} bytes");
                Err(JinjaError::new(JinjaErrorKind::Memory, message))
            }
        }
    }

    /// Runs `work` one level deeper.
    ///
    /// Errors: the nesting is too deep, or `work` fails.
    pub(crate) fn nested<T>(
        &mut self,
        work: impl FnOnce(&mut Self) -> JinjaResult<T>,
    ) -> JinjaResult<T> {
        if self.depth >= DEPTH_MAX {
            return Err(JinjaError::new(JinjaErrorKind::Depth, "maximum recursion depth exceeded"));
        }
        self.depth += 1;
        let result = work(self);
        self.depth -= 1;
        result
    }

    /// Returns the text that `work` writes.
    pub(crate) fn capture(
        &mut self,
        work: impl FnOnce(&mut Self) -> JinjaResult<super::statements::ControlFlow>,
    ) -> JinjaResult<String> {
        self.buffers.push(String::new());
        let flow = work(self);
        let text = self.buffers.pop().unwrap_or_default();
        flow.map(|_| text)
    }

    /// Appends to the text that is being rendered.
    ///
    /// Errors: the rendered text exceeds its maximum size.
    pub(crate) fn write(&mut self, text: &str) -> JinjaResult<()> {
        if self.buffers.len() > 1 {
            self.charge(text.len())?;
        }
        let is_root = self.buffers.len() == 1;
        let max = self.limits.output_bytes;
        let Some(buffer) = self.buffers.last_mut() else { return Ok(()) };
        if is_root && buffer.len() + text.len() > max {
            return Err(JinjaError::new(
                JinjaErrorKind::Output,
                format!("output exceeds {max} bytes"),
            ));
        }
        buffer.push_str(text);
        Ok(())
    }

    /// Appends the text of a value to the text that is being rendered.
    ///
    /// Errors: the value has no text, or the rendered text exceeds its maximum size.
    pub(crate) fn print(&mut self, value: &JinjaValue) -> JinjaResult<()> {
        if let Some(text) = value.as_str() {
            return self.write(text);
        }
        let mut text = String::new();
        self.write_str(value, &mut text)?;
        self.write(&text)
    }

    /// Identifiers of the special variables.
    pub(crate) fn special(&self) -> SpecialIds {
        self.special
    }

    /// Formats the present time.
    pub(crate) fn strftime_now(&self, format: &str) -> String {
        (self.strftime_now)(format)
    }

    /// Returns a block of the template.
    pub(crate) fn block(&self, name: &str) -> Option<Arc<BlockNode>> {
        self.code.blocks.iter().find(|block| &*block.name == name).map(Arc::clone)
    }

    /// Records a namespace, whose attributes are dropped at the end of the rendering.
    ///
    /// Errors: a limit is exceeded.
    pub(crate) fn new_namespace(&mut self, attributes: DictValue) -> JinjaResult<JinjaValue> {
        self.charge(attributes.len() * 64 + 64)?;
        let namespace = Rc::new(NamespaceValue { attributes: attributes.into() });
        self.namespaces.push(Rc::clone(&namespace));
        Ok(JinjaValue::Namespace(namespace))
    }

    /// Records the scope of a macro, whose variables are dropped at the end of the rendering.
    pub(crate) fn capture_scope(&mut self, scope: &VariableScope) -> VariableScope {
        if let Some(frame) = scope {
            self.captured.push(Rc::clone(frame));
        }
        scope.clone()
    }

    /// Assigns a value to a target.
    ///
    /// Errors: the target is no namespace, or the value has another number of items than the target.
    pub(crate) fn assign(
        &mut self,
        target: &AssignTarget,
        value: JinjaValue,
        scope: &VariableScope,
    ) -> JinjaResult<()> {
        match target {
            AssignTarget::Name(id) => self.set_variable(*id, value, scope),
            AssignTarget::Attribute(id, attribute) => {
                let JinjaValue::Namespace(namespace) = self.variable(*id, scope) else {
                    let message = "cannot assign attribute on non-namespace object";
                    return Err(JinjaError::runtime(message));
                };
                self.charge(attribute.len() + size_of::<JinjaValue>())?;
                let name = JinjaValue::Str(Arc::clone(attribute));
                namespace.attributes.borrow_mut().insert(name, value)?;
            }
            AssignTarget::Tuple(targets) => {
                let mut items = ValueIterator::new(&value).map_err(|_| {
                    let kind = value.type_name();
                    JinjaError::type_error(format!("cannot unpack non-iterable {kind} object"))
                })?;
                let expected = targets.len();
                for (index, target) in targets.iter().enumerate() {
                    let Some(item) = items.next(self)? else {
                        let message = format!(
                            "not enough values to unpack (expected {expected}, got {index})"
                        );
                        return Err(JinjaError::value_error(message));
                    };
                    self.assign(target, item, scope)?;
                }
                if items.next(self)?.is_some() {
                    let message = format!("too many values to unpack (expected {expected})");
                    return Err(JinjaError::value_error(message));
                }
            }
        }
        Ok(())
    }

    /// Sets a variable of a scope.
    pub(crate) fn set_variable(&mut self, id: NameId, value: JinjaValue, scope: &VariableScope) {
        match scope {
            Some(frame) => frame.set(id, value),
            None => self.slots[id.0 as usize] = Some(value),
        }
    }

    /// Returns the value of a variable.
    pub(crate) fn variable(&self, id: NameId, scope: &VariableScope) -> JinjaValue {
        if let Some(value) = find_variable(scope, id) {
            return value;
        }
        if let Some(Some(value)) = self.slots.get(id.0 as usize) {
            return value.clone();
        }
        let name = Arc::clone(&self.code.names[id.0 as usize]);
        JinjaValue::Undefined(Rc::new(UndefinedValue::Name(name)))
    }

    /// Evaluates an expression.
    ///
    /// Errors: the expression fails, or a limit is exceeded.
    pub(crate) fn evaluate(
        &mut self,
        expression: &Expression,
        scope: &VariableScope,
    ) -> JinjaResult<JinjaValue> {
        self.spend(1)?;
        match expression {
            Expression::Literal(literal) => Ok(literal_value(literal)),
            Expression::Name(id) => Ok(self.variable(*id, scope)),
            _ => self.nested(|evaluator| evaluator.evaluate_operation(expression, scope)),
        }
    }

    fn evaluate_operation(
        &mut self,
        expression: &Expression,
        scope: &VariableScope,
    ) -> JinjaResult<JinjaValue> {
        match expression {
            Expression::Literal(literal) => Ok(literal_value(literal)),
            Expression::Name(id) => Ok(self.variable(*id, scope)),
            Expression::List(items) => JinjaValue::list(self.evaluate_all(items, scope)?),
            Expression::Tuple(items) => JinjaValue::tuple(self.evaluate_all(items, scope)?),
            Expression::Dict(pairs) => self.evaluate_dict(pairs, scope),
            Expression::Attribute(target, name) => {
                let target = self.evaluate(target, scope)?;
                self.attribute(&target, name)
            }
            Expression::Item(target, index) => {
                let target = self.evaluate(target, scope)?;
                let index = self.evaluate(index, scope)?;
                self.item(&target, &index)
            }
            Expression::Slice(slice) => self.evaluate_slice(slice, scope),
            Expression::Call(call) => self.evaluate_call(call, None, scope),
            Expression::Filter(filter) => self.evaluate_filter(filter, None, scope),
            Expression::Test(test) => self.evaluate_test(test, scope),
            Expression::Not(value) => Ok(JinjaValue::Bool(!self.evaluate(value, scope)?.is_true())),
            Expression::Negative(value) => signed(&self.evaluate(value, scope)?, true),
            Expression::Positive(value) => signed(&self.evaluate(value, scope)?, false),
            Expression::Binary(operator, left, right) => {
                let left = self.evaluate(left, scope)?;
                let right = self.evaluate(right, scope)?;
                binary(self, *operator, &left, &right)
            }
            Expression::And(left, right) => {
                let left = self.evaluate(left, scope)?;
                if left.is_true() { self.evaluate(right, scope) } else { Ok(left) }
            }
            Expression::Or(left, right) => {
                let left = self.evaluate(left, scope)?;
                if left.is_true() { Ok(left) } else { self.evaluate(right, scope) }
            }
            Expression::Concat(parts) => self.evaluate_concat(parts, scope),
            Expression::Compare(first, rest) => self.evaluate_compare(first, rest, scope),
            Expression::Conditional(node) => self.evaluate_conditional(node, scope),
        }
    }

    fn evaluate_all(
        &mut self,
        expressions: &[Expression],
        scope: &VariableScope,
    ) -> JinjaResult<Vec<JinjaValue>> {
        self.charge(expressions.len() * size_of::<JinjaValue>())?;
        expressions.iter().map(|expression| self.evaluate(expression, scope)).collect()
    }

    fn evaluate_dict(
        &mut self,
        pairs: &[super::ast::DictPair],
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
        parts: &[Expression],
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
        first: &Expression,
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
                .push(super::arguments::NamedValue { name: Arc::clone(&argument.name), value });
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

    /// Evaluates a filter; `text` is the value of a filter block.
    pub(crate) fn evaluate_filter(
        &mut self,
        filter: &FilterExpression,
        text: Option<JinjaValue>,
        scope: &VariableScope,
    ) -> JinjaResult<JinjaValue> {
        let target = match (&filter.target, text) {
            // The text of a filter block is the value of its innermost filter.
            (Some(Expression::Filter(inner)), Some(text)) => {
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
        function(self, target, arguments)
    }

    fn evaluate_test(
        &mut self,
        test: &TestExpression,
        scope: &VariableScope,
    ) -> JinjaResult<JinjaValue> {
        let target = self.evaluate(&test.target, scope)?;
        let arguments = self.arguments(&test.arguments, scope)?;
        let Some(function) = test.function else {
            return Err(JinjaError::runtime(format!("No test named '{}' found.", test.name)));
        };
        Ok(JinjaValue::Bool(function(self, &target, arguments)?))
    }

    /// Evaluates a call; `caller` is the macro of a call block.
    pub(crate) fn evaluate_call(
        &mut self,
        call: &CallExpression,
        caller: Option<JinjaValue>,
        scope: &VariableScope,
    ) -> JinjaResult<JinjaValue> {
        if let Expression::Attribute(target, name) = &call.target {
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
