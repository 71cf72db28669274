//! Parser of loops, conditions, assignments, blocks, and statements that load other templates.

use super::ast::{
    AssignTarget, BlockNode, ExpressionNode, ForNode, IfBranch, JinjaStatement, StatementList,
    WithVariable,
};
use super::error::JinjaResult;
use super::parser::{StatementContext, TemplateParser};
use super::token::JinjaTokenValue;
use std::sync::Arc;

impl TemplateParser {
    /// Parses a `for` loop after its tag name.
    pub(super) fn for_statement(&mut self) -> JinjaResult<JinjaStatement> {
        let strict = |place: &mut StatementContext| {
            place.is_soft = false;
            place.is_top = false;
            place.enclosing_loops += 1;
        };
        let outer = self.place;
        self.place.enclosing_loops += 1;
        let target = self.assign_target(false)?;
        self.expect_name("in")?;
        let iterable = self.tuple_expression(false)?;
        let test = if self.skip_name("if") {
            Some(self.within(strict, |parser| parser.expression(true))?)
        } else {
            None
        };
        let is_recursive = self.skip_name("recursive");
        self.usage.enter();
        let in_loop = |place: &mut StatementContext| {
            strict(place);
            place.loops += 1;
        };
        let body = self.within(in_loop, |parser| parser.body(&["endfor", "else"]))?;
        let uses_loop = self.usage.leave().uses_loop || is_recursive;
        let otherwise = if self.skip_name("endfor") {
            StatementList::new()
        } else {
            self.advance();
            let after_loop = |place: &mut StatementContext| {
                strict(place);
                place.loops = if is_recursive { 0 } else { place.loops };
            };
            self.within(after_loop, |parser| parser.body_to("endfor"))?
        };
        self.place = outer;
        let node = ForNode { target, iterable, test, body, otherwise, is_recursive, uses_loop };
        Ok(JinjaStatement::For(Arc::new(node)))
    }

    /// Parses an `if` statement after its tag name.
    pub(super) fn if_statement(&mut self) -> JinjaResult<JinjaStatement> {
        self.within(
            |place| place.is_soft = true,
            |parser| {
                let mut branches = Vec::new();
                loop {
                    let test = parser.tuple_expression(false)?;
                    let body = parser.body(&["elif", "else", "endif"])?;
                    branches.push(IfBranch { test, body });
                    if parser.skip_name("elif") {
                        continue;
                    }
                    if parser.skip_name("else") {
                        let otherwise = parser.body_to("endif")?;
                        return Ok(JinjaStatement::If(branches, otherwise));
                    }
                    parser.advance();
                    return Ok(JinjaStatement::If(branches, StatementList::new()));
                }
            },
        )
    }

    /// Parses an assignment after its tag name.
    pub(super) fn set_statement(&mut self) -> JinjaResult<JinjaStatement> {
        let target = self.assign_target(true)?;
        if self.skip_operator("=") {
            return Ok(JinjaStatement::Set(target, self.tuple_expression(true)?));
        }
        let filter = if self.current().is_operator("|") {
            Some(self.filter_chain(None, false)?)
        } else {
            None
        };
        Ok(JinjaStatement::SetBlock(target, filter, self.scoped_body("endset")?))
    }

    /// Parses a `{% with %}` block after its tag name.
    pub(super) fn with_statement(&mut self) -> JinjaResult<JinjaStatement> {
        let mut variables = Vec::new();
        while *self.current() != JinjaTokenValue::BlockEnd && !self.current().is_operator(":") {
            if !variables.is_empty() {
                self.expect_operator(",")?;
            }
            let target = self.with_target()?;
            self.expect_operator("=")?;
            let value = self.expression(true)?;
            variables.push(WithVariable { target, value });
        }
        Ok(JinjaStatement::With(variables, self.scoped_body("endwith")?))
    }

    fn with_target(&mut self) -> JinjaResult<AssignTarget> {
        // A `{% with %}` block can define a variable named `loop`, like a macro can have a parameter of this
        // name.
        self.within(|place| place.enclosing_loops = 0, |parser| parser.assign_target(false))
    }

    /// Parses a named block after its tag name.
    pub(super) fn block_statement(&mut self) -> JinjaResult<JinjaStatement> {
        let name = self.name()?;
        let is_scoped = self.skip_name("scoped");
        let is_required = self.skip_name("required");
        if self.blocks.iter().any(|block| block.name == name) {
            return Err(self.fail(format!("block '{name}' defined twice")));
        }
        let outer_usage = std::mem::take(&mut self.usage);
        let function = |place: &mut StatementContext| {
            place.is_soft = false;
            place.is_top = false;
            place.loops = 0;
        };
        let body = self.within(function, |parser| parser.body_to("endblock"))?;
        self.usage = outer_usage;
        self.skip_name(&name);
        let block = Arc::new(BlockNode { name, is_scoped, is_required, body });
        if self.blocks.iter().any(|other| other.name == block.name) {
            return Err(self.fail(format!("block '{}' defined twice", block.name)));
        }
        self.blocks.push(Arc::clone(&block));
        Ok(JinjaStatement::Block(block))
    }

    /// Parses a statement that loads another template; executing the statement fails.
    pub(super) fn load_statement(&mut self, tag: &str) -> JinjaResult<JinjaStatement> {
        if tag == "extends" && !self.place.is_top {
            return Err(self.fail("cannot use extend from a non top-level scope"));
        }
        let template: ExpressionNode = self.expression(true)?;
        while *self.current() != JinjaTokenValue::BlockEnd
            && *self.current() != JinjaTokenValue::End
        {
            self.advance();
        }
        Ok(JinjaStatement::LoadTemplate(template))
    }
}
