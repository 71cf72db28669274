//! Parser of macros, call blocks, and the targets of assignments.

use super::ast::{AssignTarget, ExpressionNode, JinjaStatement, MacroNode, MacroParameter};
use super::error::JinjaResult;
use super::parser::{StatementContext, TemplateParser};
use super::token::JinjaTokenValue;
use std::sync::Arc;

impl TemplateParser {
    /// Parses a macro after its tag name.
    pub(super) fn macro_statement(&mut self) -> JinjaResult<JinjaStatement> {
        let name = self.name()?;
        self.check_assignable(&name)?;
        self.usage.store(&name);
        let id = self.name_id(&name);
        let node = self.function(Some(name), true, "endmacro")?;
        Ok(JinjaStatement::Macro(id, Arc::new(node)))
    }

    /// Parses a call block after its tag name.
    pub(super) fn call_statement(&mut self) -> JinjaResult<JinjaStatement> {
        let place = self.place;
        enter_function(&mut self.place);
        self.usage.enter();
        let parameters =
            if self.current().is_operator("(") { self.signature()? } else { Vec::new() };
        self.usage.leave();
        self.place = place;
        let ExpressionNode::Call(call) = self.expression(true)? else {
            return Err(self.fail("expected call"));
        };
        let node = self.function_body(None, parameters, "endcall")?;
        Ok(JinjaStatement::CallBlock(Arc::new(node), *call))
    }

    /// Parses the body of a `{% generation %}` block, which transformers implements as a `{% call %}` block.
    pub(super) fn generation_body(&mut self) -> JinjaResult<Arc<MacroNode>> {
        Ok(Arc::new(self.function_body(None, Vec::new(), "endgeneration")?))
    }

    fn function(
        &mut self,
        name: Option<Arc<str>>,
        has_signature: bool,
        end: &str,
    ) -> JinjaResult<MacroNode> {
        let parameters =
            if has_signature { self.within(enter_function, Self::signature)? } else { Vec::new() };
        self.function_body(name, parameters, end)
    }

    fn function_body(
        &mut self,
        name: Option<Arc<str>>,
        parameters: Vec<MacroParameter>,
        end: &str,
    ) -> JinjaResult<MacroNode> {
        self.usage.enter();
        let body = self.within(enter_function, |parser| parser.body_to(end))?;
        let mut uses = self.usage.leave().parameters;
        let declares = |name: &str| parameters.iter().any(|parameter| &*parameter.name == name);
        let caller = parameters.iter().find(|parameter| &*parameter.name == "caller");
        if uses.caller && caller.is_some_and(|caller| caller.default.is_none()) {
            return Err(self.fail(
                "When defining macros or call blocks the special \"caller\" argument must be omitted or be \
                 given a default.",
            ));
        }
        uses.kwargs &= !declares("kwargs");
        uses.varargs &= !declares("varargs");
        Ok(MacroNode { name, parameters, body, uses })
    }

    fn signature(&mut self) -> JinjaResult<Vec<MacroParameter>> {
        let mut parameters: Vec<MacroParameter> = Vec::new();
        self.expect_operator("(")?;
        while !self.current().is_operator(")") {
            if !parameters.is_empty() {
                self.expect_operator(",")?;
            }
            let name = self.name()?;
            self.check_assignable(&name)?;
            self.usage.store(&name);
            let default = if self.skip_operator("=") { Some(self.expression(true)?) } else { None };
            if default.is_none() && parameters.iter().any(|parameter| parameter.default.is_some()) {
                return Err(self.fail("non-default argument follows default argument"));
            }
            if parameters.iter().any(|parameter| parameter.name == name) {
                return Err(
                    self.fail(format!("duplicate argument '{name}' in function definition"))
                );
            }
            parameters.push(MacroParameter { id: self.name_id(&name), name, default });
        }
        self.expect_operator(")")?;
        Ok(parameters)
    }

    fn check_assignable(&self, name: &str) -> JinjaResult<()> {
        if matches!(name, "true" | "false" | "none" | "True" | "False" | "None") {
            return Err(self.fail("can't assign to 'const'"));
        }
        Ok(())
    }

    /// Parses the target of an assignment. With `with_namespace`, attributes of namespaces are valid targets.
    pub(super) fn assign_target(&mut self, with_namespace: bool) -> JinjaResult<AssignTarget> {
        let mut targets = Vec::new();
        let mut is_tuple = false;
        loop {
            let at_end =
                matches!(self.current(), JinjaTokenValue::VariableEnd | JinjaTokenValue::BlockEnd)
                    || self.current().is_operator(")");
            if at_end {
                break;
            }
            targets.push(self.single_target(with_namespace)?);
            if !self.skip_operator(",") {
                break;
            }
            is_tuple = true;
        }
        if is_tuple {
            return Ok(AssignTarget::Tuple(targets));
        }
        match targets.pop() {
            Some(target) => Ok(target),
            None => Err(self.fail(format!("Expected an expression, got '{}'", self.current()))),
        }
    }

    fn single_target(&mut self, with_namespace: bool) -> JinjaResult<AssignTarget> {
        if self.current().is_operator("(") {
            self.advance();
            self.deepen(|parser| {
                let target = parser.assign_target(false)?;
                parser.expect_operator(")")?;
                Ok(target)
            })
        } else {
            let name = match self.current() {
                JinjaTokenValue::Name(_) => self.name()?,
                _ => return Err(self.fail("can't assign to this expression")),
            };
            self.check_assignable(&name)?;
            if with_namespace && self.skip_operator(".") {
                self.usage.load(&name);
                let attribute = self.name()?;
                return Ok(AssignTarget::Attribute(self.name_id(&name), attribute));
            }
            if self.place.enclosing_loops > 0 && &*name == "loop" {
                return Err(self.fail("Can't assign to special loop variable in for-loop target"));
            }
            self.usage.store(&name);
            Ok(AssignTarget::Name(self.name_id(&name)))
        }
    }
}

/// Changes the parsing context to the body of a macro.
fn enter_function(place: &mut StatementContext) {
    place.is_soft = false;
    place.is_top = false;
    place.loops = 0;
}
