//! State of a rendering: its limits, variables and text.

use super::CompiledTemplateTree;
use super::ast::{AssignTarget, BlockNode, NameId};
use super::dict::DictValue;
use super::error::{JinjaError, JinjaErrorKind, JinjaResult};
use super::iteration::ValueIterator;
use super::scope::{ScopeFrame, VariableScope, find_variable};
use super::statements::ControlFlow;
use super::value::{JinjaValue, NamespaceValue, SpecialVariableIds, UndefinedValue};
use std::rc::Rc;
use std::sync::Arc;

/// Maximum nesting of expressions, statements and calls in a rendering; it prevents a stack overflow.
const DEPTH_MAX: u32 = 600;

/// Number of processed bytes that count as one instruction.
const BYTES_PER_INSTRUCTION: usize = 256;

/// Limits of the work and memory of one rendering of a chat template.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RenderLimits {
    /// Maximum number of instructions.
    pub(crate) instructions: u64,
    /// Maximum size of the rendered text in bytes.
    pub(crate) output_bytes: usize,
    /// Maximum size in bytes of all values that the template creates.
    pub(crate) value_bytes: usize,
}

/// Evaluates a compiled template: the state of one rendering.
pub(crate) struct TemplateEvaluator {
    code: Arc<CompiledTemplateTree>,
    /// Variables of the template.
    slots: Vec<Option<JinjaValue>>,
    /// Stack of output buffers: the rendered text of the template, then one buffer for each enclosing macro
    /// call or captured block, the innermost last.
    buffers: Vec<String>,
    limits: RenderLimits,
    /// Instructions left.
    fuel: u64,
    /// Bytes of values left.
    bytes_left: usize,
    depth: u32,
    special: SpecialVariableIds,
    /// Formats the present time.
    strftime_now: fn(&str) -> String,
    /// All namespaces. They are emptied at the end of the rendering: a namespace that contains itself would
    /// never be freed.
    namespaces: Vec<Rc<NamespaceValue>>,
    /// Captured scopes of macros. They are emptied at the end of the rendering: a scope that contains its own
    /// macro would never be freed.
    captured: Vec<Rc<ScopeFrame>>,
}

impl TemplateEvaluator {
    /// Creates the state of a rendering; `slots` holds the initial value of each name of the template, by
    /// name id.
    pub(crate) fn new(
        code: &Arc<CompiledTemplateTree>,
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

    /// Subtracts `instructions` from the remaining instructions.
    ///
    /// Errors: the instruction limit is exceeded.
    pub(crate) fn spend(&mut self, instructions: u64) -> JinjaResult<()> {
        match self.fuel.checked_sub(instructions) {
            Some(fuel) => {
                self.fuel = fuel;
                Ok(())
            }
            None => Err(JinjaError::new(JinjaErrorKind::Fuel, "too many instructions")),
        }
    }

    /// Subtracts the instructions that processing `bytes` bytes costs.
    ///
    /// Errors: the instruction limit is exceeded.
    pub(crate) fn spend_bytes(&mut self, bytes: usize) -> JinjaResult<()> {
        self.spend((bytes / BYTES_PER_INSTRUCTION) as u64)
    }

    /// Subtracts the size of a new value from the remaining value bytes.
    ///
    /// Errors: the values of the template exceed their maximum size.
    pub(crate) fn charge(&mut self, bytes: usize) -> JinjaResult<()> {
        if let Some(left) = self.bytes_left.checked_sub(bytes) {
            self.bytes_left = left;
            return Ok(());
        }
        let max = self.limits.value_bytes;
        let message = format!("the values of the template exceed {max} bytes");
        Err(JinjaError::new(JinjaErrorKind::Memory, message))
    }

    /// Runs `work` with the nesting depth increased by one.
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

    /// Runs `work` and returns the text that it writes, without adding it to the rendered text.
    pub(crate) fn capture(
        &mut self,
        work: impl FnOnce(&mut Self) -> JinjaResult<ControlFlow>,
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

    /// Returns the name ids of the special variables `caller`, `kwargs`, `varargs` and `loop`.
    pub(crate) fn special(&self) -> SpecialVariableIds {
        self.special
    }

    /// Formats the present time.
    pub(crate) fn strftime_now(&self, format: &str) -> String {
        (self.strftime_now)(format)
    }

    /// Returns the block of the template with the name `name`.
    pub(crate) fn block(&self, name: &str) -> Option<Arc<BlockNode>> {
        self.code.blocks.iter().find(|block| &*block.name == name).map(Arc::clone)
    }

    /// Creates a namespace and adds it to the list of namespaces whose attributes are dropped at the end of
    /// the rendering.
    ///
    /// Errors: a limit is exceeded.
    pub(crate) fn new_namespace(&mut self, attributes: DictValue) -> JinjaResult<JinjaValue> {
        self.charge(attributes.len() * 64 + 64)?;
        let namespace = Rc::new(NamespaceValue { attributes: attributes.into() });
        self.namespaces.push(Rc::clone(&namespace));
        Ok(JinjaValue::Namespace(namespace))
    }

    /// Returns the scope that a macro captures, and adds it to the list of scopes whose variables are dropped
    /// at the end of the rendering.
    pub(crate) fn capture_scope(&mut self, scope: &VariableScope) -> VariableScope {
        if let Some(frame) = scope {
            self.captured.push(Rc::clone(frame));
        }
        scope.clone()
    }

    /// Assigns a value to a target.
    ///
    /// Errors: the target is an attribute of a value that is not a namespace, or a tuple target and the value
    /// have different numbers of items.
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
}
