//! Parser of the parts of expressions: list and dict literals, attributes, elements, calls, filters and
//! tests.

use super::ast::{
    ArgumentList, CallExpression, DictPair, ExpressionNode, FilterExpression, JinjaTestExpression,
    KeywordArgument, SliceExpression,
};
use super::error::{JinjaError, JinjaResult};
use super::parser::TemplateParser;
use super::parser_expressions::integer_literal;
use super::token::JinjaTokenValue;
use super::{filters, value_tests};
use std::sync::Arc;

impl TemplateParser {
    /// Parses a list.
    pub(super) fn list(&mut self) -> JinjaResult<ExpressionNode> {
        self.expect_operator("[")?;
        let mut items = Vec::new();
        let mut height = 0;
        while !self.current().is_operator("]") {
            items.push(self.expression(true)?);
            height = height.max(self.height);
            if !self.current().is_operator("]") {
                self.expect_operator(",")?;
            }
        }
        self.advance();
        self.height = height;
        self.join(0)?;
        Ok(ExpressionNode::List(items))
    }

    /// Parses a dict.
    pub(super) fn dict(&mut self) -> JinjaResult<ExpressionNode> {
        self.expect_operator("{")?;
        let mut pairs = Vec::new();
        let mut height = 0;
        while !self.current().is_operator("}") {
            let key = self.expression(true)?;
            height = height.max(self.height);
            self.expect_operator(":")?;
            let value = self.expression(true)?;
            height = height.max(self.height);
            pairs.push(DictPair { key, value });
            if !self.current().is_operator("}") {
                self.expect_operator(",")?;
            }
        }
        self.advance();
        self.height = height;
        self.join(0)?;
        Ok(ExpressionNode::Dict(pairs))
    }

    /// Parses attributes, elements and calls of `node`.
    pub(super) fn postfix(&mut self, mut node: ExpressionNode) -> JinjaResult<ExpressionNode> {
        loop {
            node = match self.current() {
                JinjaTokenValue::Operator(".") => self.attribute(node)?,
                JinjaTokenValue::Operator("[") => self.subscript(node)?,
                JinjaTokenValue::Operator("(") => self.call(node)?,
                _ => return Ok(node),
            };
        }
    }

    /// Parses filters, tests and calls of `node`.
    pub(super) fn filter_expression(
        &mut self,
        mut node: ExpressionNode,
    ) -> JinjaResult<ExpressionNode> {
        loop {
            node = match self.current() {
                JinjaTokenValue::Operator("|") => self.filter_chain(Some(node), false)?,
                JinjaTokenValue::Operator("(") => self.call(node)?,
                name if name.is_name("is") => self.test(node)?,
                _ => return Ok(node),
            };
        }
    }

    fn attribute(&mut self, target: ExpressionNode) -> JinjaResult<ExpressionNode> {
        self.advance();
        self.join(0)?;
        match self.current().clone() {
            JinjaTokenValue::Name(name) => {
                self.advance();
                Ok(ExpressionNode::Attribute(Box::new(target), name))
            }
            JinjaTokenValue::Integer(digits) => {
                self.advance();
                let index = ExpressionNode::Literal(integer_literal(&digits));
                Ok(ExpressionNode::Item(Box::new(target), Box::new(index)))
            }
            _ => Err(self.fail("expected name or number")),
        }
    }

    fn subscript(&mut self, target: ExpressionNode) -> JinjaResult<ExpressionNode> {
        self.advance();
        let mut items = Vec::new();
        let mut height = self.height;
        while !self.current().is_operator("]") {
            if !items.is_empty() {
                self.expect_operator(",")?;
            }
            let start =
                if self.current().is_operator(":") { None } else { Some(self.expression(true)?) };
            height = height.max(self.height);
            match start {
                Some(index) if !self.current().is_operator(":") => items.push(index),
                start => {
                    if !items.is_empty() {
                        return Err(self.fail("a slice cannot be a part of a tuple"));
                    }
                    let slice = self.slice(target, start)?;
                    self.expect_operator("]")?;
                    self.join(height)?;
                    return Ok(slice);
                }
            }
        }
        self.advance();
        self.join(height)?;
        Ok(ExpressionNode::Item(Box::new(target), Box::new(index_of(items))))
    }

    fn slice(
        &mut self,
        target: ExpressionNode,
        start: Option<ExpressionNode>,
    ) -> JinjaResult<ExpressionNode> {
        self.advance();
        let stop = self.slice_bound()?;
        let height = self.height;
        let step = if self.skip_operator(":") { self.slice_bound()? } else { None };
        self.height = self.height.max(height);
        Ok(ExpressionNode::Slice(Box::new(SliceExpression { target, start, stop, step })))
    }

    fn slice_bound(&mut self) -> JinjaResult<Option<ExpressionNode>> {
        let ends = [":", "]", ","].into_iter().any(|end| self.current().is_operator(end));
        if ends { Ok(None) } else { self.expression(true).map(Some) }
    }

    fn call(&mut self, target: ExpressionNode) -> JinjaResult<ExpressionNode> {
        let height = self.height;
        let arguments = self.arguments()?;
        self.join(height)?;
        Ok(ExpressionNode::Call(Box::new(CallExpression { target, arguments })))
    }

    fn arguments(&mut self) -> JinjaResult<ArgumentList> {
        self.expect_operator("(")?;
        let mut list = ArgumentList::default();
        let mut height = 0;
        while !self.current().is_operator(")") {
            let invalid = if self.skip_operator("*") {
                let invalid = list.spread.is_some() || list.spread_keyword.is_some();
                list.spread = Some(self.expression(true)?);
                invalid
            } else if self.skip_operator("**") {
                let invalid = list.spread_keyword.is_some();
                list.spread_keyword = Some(self.expression(true)?);
                invalid
            } else if matches!(self.current(), JinjaTokenValue::Name(_))
                && self.following().is_operator("=")
            {
                let name = self.name()?;
                self.advance();
                let value = self.expression(true)?;
                let repeated = list.keyword.iter().any(|argument| argument.name == name);
                list.keyword.push(KeywordArgument { name, value });
                list.spread_keyword.is_some() || repeated
            } else {
                list.positional.push(self.expression(true)?);
                list.spread.is_some() || list.spread_keyword.is_some() || !list.keyword.is_empty()
            };
            height = height.max(self.height);
            if invalid {
                return Err(self.fail("invalid syntax for function call expression"));
            }
            if !self.current().is_operator(")") {
                self.expect_operator(",")?;
            }
        }
        self.advance();
        self.height = height;
        Ok(list)
    }

    fn optional_arguments(&mut self) -> JinjaResult<ArgumentList> {
        if self.current().is_operator("(") {
            return self.arguments();
        }
        self.height = 0;
        Ok(ArgumentList::default())
    }

    fn dotted_name(&mut self) -> JinjaResult<Arc<str>> {
        let mut name = self.name()?.to_string();
        while self.skip_operator(".") {
            name.push('.');
            name.push_str(&self.name()?);
        }
        Ok(Arc::from(name))
    }

    /// Parses the filters applied to `target`. With `starts_inline`, no `|` precedes the first filter.
    pub(super) fn filter_chain(
        &mut self,
        target: Option<ExpressionNode>,
        starts_inline: bool,
    ) -> JinjaResult<ExpressionNode> {
        let mut target = target;
        let mut inline = starts_inline;
        loop {
            if !inline {
                self.expect_operator("|")?;
            }
            inline = false;
            let line = self.line();
            let name = self.dotted_name()?;
            let height = if target.is_some() { self.height } else { 0 };
            let arguments = self.optional_arguments()?;
            self.join(height)?;
            let function = filters::find(&name);
            if function.is_none() && !self.place.is_soft {
                self.unknown_names
                    .push(JinjaError::syntax(format!("No filter named '{name}'."), line));
            }
            let filter = FilterExpression { target, name, function, arguments };
            let node = ExpressionNode::Filter(Box::new(filter));
            if !self.current().is_operator("|") {
                return Ok(node);
            }
            target = Some(node);
        }
    }

    fn test(&mut self, target: ExpressionNode) -> JinjaResult<ExpressionNode> {
        self.advance();
        let line = self.line();
        let negated = self.skip_name("not");
        let name = self.dotted_name()?;
        let height = self.height;
        let arguments = self.test_arguments()?;
        self.join(height + 1)?;
        let function = value_tests::find(&name);
        if function.is_none() && !self.place.is_soft {
            self.unknown_names.push(JinjaError::syntax(format!("No test named '{name}'."), line));
        }
        let node = ExpressionNode::Test(Box::new(JinjaTestExpression {
            target,
            name,
            function,
            arguments,
        }));
        Ok(if negated { ExpressionNode::Not(Box::new(node)) } else { node })
    }

    fn test_arguments(&mut self) -> JinjaResult<ArgumentList> {
        let begins_argument = match self.current() {
            JinjaTokenValue::Operator("(") => return self.arguments(),
            JinjaTokenValue::Name(name) => !matches!(&**name, "else" | "or" | "and"),
            JinjaTokenValue::Text(_) | JinjaTokenValue::Integer(_) | JinjaTokenValue::Float(_) => {
                true
            }
            JinjaTokenValue::Operator(operator) => matches!(*operator, "[" | "{"),
            _ => false,
        };
        if !begins_argument {
            self.height = 0;
            return Ok(ArgumentList::default());
        }
        if self.current().is_name("is") {
            return Err(self.fail("You cannot chain multiple tests with is"));
        }
        let argument = self.deepen(|parser| {
            let argument = parser.primary()?;
            parser.postfix(argument)
        })?;
        Ok(ArgumentList { positional: vec![argument], ..ArgumentList::default() })
    }
}

/// Returns the index of a subscript: the item of a list of one item, else a tuple of the items, as in `x[1, 2]`.
fn index_of(mut items: Vec<ExpressionNode>) -> ExpressionNode {
    match items.pop() {
        Some(index) if items.is_empty() => index,
        last => {
            items.extend(last);
            ExpressionNode::Tuple(items)
        }
    }
}
