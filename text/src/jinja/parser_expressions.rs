//! Parser of expressions, with Jinja2's operator precedence.

use super::ast::{
    BinaryOperator, CompareOperand, CompareOperator, ConditionalExpression, ExpressionNode,
    LiteralValue,
};
use super::error::JinjaResult;
use super::parser::TemplateParser;
use super::token::JinjaTokenValue;
use std::sync::Arc;

/// Maximum nesting of brackets and prefix operators. Jinja2 fails at about this depth, at Python's recursion
/// limit.
const NESTING_MAX: u32 = 80;

/// Maximum height of an expression tree; `a + b + c` has height 3.
const HEIGHT_MAX: u32 = 200;

impl TemplateParser {
    /// Runs a parser function one expression nesting level deeper.
    pub(super) fn deepen<T>(
        &mut self,
        parse: impl FnOnce(&mut Self) -> JinjaResult<T>,
    ) -> JinjaResult<T> {
        self.nesting += 1;
        if self.nesting > NESTING_MAX {
            return Err(self.fail("expression is nested too deeply"));
        }
        let parsed = parse(self);
        self.nesting -= 1;
        parsed
    }

    /// Updates the tree height after two expressions became operands of one expression: the last parsed one,
    /// and one of height `height`.
    pub(super) fn join(&mut self, height: u32) -> JinjaResult<()> {
        self.height = self.height.max(height) + 1;
        if self.height > HEIGHT_MAX {
            return Err(self.fail("expression has too many operators"));
        }
        Ok(())
    }

    /// Parses an expression; `with_condition` permits a conditional expression.
    pub(super) fn expression(&mut self, with_condition: bool) -> JinjaResult<ExpressionNode> {
        self.deepen(|parser| if with_condition { parser.conditional() } else { parser.or() })
    }

    /// Parses an expression, or a tuple without parentheses.
    pub(super) fn tuple_expression(&mut self, with_condition: bool) -> JinjaResult<ExpressionNode> {
        self.tuple(with_condition, false)
    }

    fn tuple(&mut self, with_condition: bool, in_parentheses: bool) -> JinjaResult<ExpressionNode> {
        let mut items = Vec::new();
        let mut is_tuple = false;
        let mut height = 0;
        loop {
            let at_end =
                matches!(self.current(), JinjaTokenValue::VariableEnd | JinjaTokenValue::BlockEnd)
                    || self.current().is_operator(")");
            if at_end {
                break;
            }
            items.push(self.expression(with_condition)?);
            height = height.max(self.height);
            if !self.skip_operator(",") {
                break;
            }
            is_tuple = true;
        }
        self.height = height;
        if is_tuple {
            self.join(0)?;
            return Ok(ExpressionNode::Tuple(items));
        }
        match items.pop() {
            Some(item) => Ok(item),
            None if in_parentheses => Ok(ExpressionNode::Tuple(items)),
            None => Err(self.fail(format!("Expected an expression, got '{}'", self.current()))),
        }
    }

    fn conditional(&mut self) -> JinjaResult<ExpressionNode> {
        let line = self.line();
        let unknown = self.unknown_names.len();
        let mut value = self.or()?;
        while self.skip_name("if") {
            let mut height = self.height;
            let test = self.or()?;
            height = height.max(self.height);
            let otherwise =
                if self.skip_name("else") { Some(self.deepen(Self::conditional)?) } else { None };
            self.join(height)?;
            let node = ConditionalExpression { test, then: value, otherwise, line };
            value = ExpressionNode::Conditional(Box::new(node));
            // Unknown filters in a conditional expression are errors only when they are evaluated.
            self.unknown_names.truncate(unknown);
        }
        Ok(value)
    }

    fn or(&mut self) -> JinjaResult<ExpressionNode> {
        let mut left = self.and()?;
        while self.skip_name("or") {
            let height = self.height;
            left = ExpressionNode::Or(Box::new(left), Box::new(self.and()?));
            self.join(height)?;
        }
        Ok(left)
    }

    fn and(&mut self) -> JinjaResult<ExpressionNode> {
        let mut left = self.not()?;
        while self.skip_name("and") {
            let height = self.height;
            left = ExpressionNode::And(Box::new(left), Box::new(self.not()?));
            self.join(height)?;
        }
        Ok(left)
    }

    fn not(&mut self) -> JinjaResult<ExpressionNode> {
        if self.skip_name("not") {
            let value = self.deepen(Self::not)?;
            self.join(0)?;
            return Ok(ExpressionNode::Not(Box::new(value)));
        }
        self.compare()
    }

    fn compare(&mut self) -> JinjaResult<ExpressionNode> {
        let first = self.sum()?;
        let mut rest = Vec::new();
        let mut height = self.height;
        while let Some(operator) = self.compare_operator() {
            let value = self.sum()?;
            height = height.max(self.height);
            rest.push(CompareOperand { operator, value });
        }
        if rest.is_empty() {
            return Ok(first);
        }
        self.join(height)?;
        Ok(ExpressionNode::Compare(Box::new(first), rest))
    }

    fn compare_operator(&mut self) -> Option<CompareOperator> {
        let operator = match self.current() {
            JinjaTokenValue::Operator("==") => CompareOperator::Equal,
            JinjaTokenValue::Operator("!=") => CompareOperator::NotEqual,
            JinjaTokenValue::Operator("<") => CompareOperator::Less,
            JinjaTokenValue::Operator("<=") => CompareOperator::LessEqual,
            JinjaTokenValue::Operator(">") => CompareOperator::Greater,
            JinjaTokenValue::Operator(">=") => CompareOperator::GreaterEqual,
            name if name.is_name("in") => CompareOperator::In,
            name if name.is_name("not") && self.following().is_name("in") => {
                self.advance();
                CompareOperator::NotIn
            }
            _ => return None,
        };
        self.advance();
        Some(operator)
    }

    fn sum(&mut self) -> JinjaResult<ExpressionNode> {
        let mut left = self.concat()?;
        loop {
            let operator = match self.current() {
                JinjaTokenValue::Operator("+") => BinaryOperator::Add,
                JinjaTokenValue::Operator("-") => BinaryOperator::Subtract,
                _ => return Ok(left),
            };
            self.advance();
            let height = self.height;
            left = ExpressionNode::Binary(operator, Box::new(left), Box::new(self.concat()?));
            self.join(height)?;
        }
    }

    fn concat(&mut self) -> JinjaResult<ExpressionNode> {
        let first = self.product()?;
        if !self.current().is_operator("~") {
            return Ok(first);
        }
        let mut parts = vec![first];
        let mut height = self.height;
        while self.skip_operator("~") {
            parts.push(self.product()?);
            height = height.max(self.height);
        }
        self.join(height)?;
        Ok(ExpressionNode::Concat(parts))
    }

    fn product(&mut self) -> JinjaResult<ExpressionNode> {
        let mut left = self.power()?;
        loop {
            let operator = match self.current() {
                JinjaTokenValue::Operator("*") => BinaryOperator::Multiply,
                JinjaTokenValue::Operator("/") => BinaryOperator::Divide,
                JinjaTokenValue::Operator("//") => BinaryOperator::FloorDivide,
                JinjaTokenValue::Operator("%") => BinaryOperator::Modulo,
                _ => return Ok(left),
            };
            self.advance();
            let height = self.height;
            left = ExpressionNode::Binary(operator, Box::new(left), Box::new(self.power()?));
            self.join(height)?;
        }
    }

    fn power(&mut self) -> JinjaResult<ExpressionNode> {
        let mut left = self.unary(true)?;
        while self.skip_operator("**") {
            let height = self.height;
            let right = Box::new(self.unary(true)?);
            left = ExpressionNode::Binary(BinaryOperator::Power, Box::new(left), right);
            self.join(height)?;
        }
        Ok(left)
    }

    fn unary(&mut self, with_filter: bool) -> JinjaResult<ExpressionNode> {
        let node = if self.skip_operator("-") {
            ExpressionNode::Negative(Box::new(self.operand()?))
        } else if self.skip_operator("+") {
            ExpressionNode::Positive(Box::new(self.operand()?))
        } else {
            self.primary()?
        };
        let node = self.postfix(node)?;
        if with_filter { self.filter_expression(node) } else { Ok(node) }
    }

    /// Parses the operand of a unary `+` or `-`.
    fn operand(&mut self) -> JinjaResult<ExpressionNode> {
        let operand = self.deepen(|parser| parser.unary(false))?;
        self.join(0)?;
        Ok(operand)
    }

    /// Returns the literal of adjacent strings; `text` is the first string.
    fn text_literal(&mut self, mut text: String) -> LiteralValue {
        while let JinjaTokenValue::Text(next) = self.following() {
            text.push_str(next);
            self.advance();
        }
        LiteralValue::Text(Arc::from(text))
    }

    /// Parses a name, a constant, or an expression in brackets.
    pub(super) fn primary(&mut self) -> JinjaResult<ExpressionNode> {
        self.height = 1;
        let literal = match self.current().clone() {
            JinjaTokenValue::Name(name) => match &*name {
                "true" | "True" => LiteralValue::Bool(true),
                "false" | "False" => LiteralValue::Bool(false),
                "none" | "None" => LiteralValue::None,
                _ => {
                    self.advance();
                    self.usage.load(&name);
                    return Ok(ExpressionNode::Name(self.name_id(&name)));
                }
            },
            JinjaTokenValue::Text(text) => self.text_literal(text),
            JinjaTokenValue::Integer(digits) => integer_literal(&digits),
            JinjaTokenValue::Float(number) => LiteralValue::Float(number),
            JinjaTokenValue::Operator("(") => {
                self.advance();
                let value = self.tuple(true, true)?;
                self.expect_operator(")")?;
                return Ok(value);
            }
            JinjaTokenValue::Operator("[") => return self.list(),
            JinjaTokenValue::Operator("{") => return self.dict(),
            token => return Err(self.fail(format!("unexpected '{token}'"))),
        };
        self.advance();
        Ok(ExpressionNode::Literal(literal))
    }
}

/// Creates the constant of an integer literal.
pub(super) fn integer_literal(digits: &str) -> LiteralValue {
    match digits.parse() {
        Ok(number) => LiteralValue::Int(number),
        Err(_) => LiteralValue::Big(Arc::new(digits.parse().unwrap_or_default())),
    }
}
