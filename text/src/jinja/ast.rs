//! Syntax tree of a template. The tree is shared between threads, so it contains no render-time values.

mod statements;

use super::filters::FilterFunction;
use super::value_tests::JinjaTestFunction;
pub(crate) use statements::{
    AssignTarget, BlockNode, ForNode, IfBranch, JinjaStatement, MacroNode, MacroParameter,
    StatementList, StatementNode, UsedSpecialParameters, WithVariable,
};
use std::sync::Arc;

/// Index into the list of names of a template.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NameId(pub(crate) u32);

/// Constant in a template.
#[derive(Debug, Clone)]
pub(crate) enum LiteralValue {
    /// `none`
    None,
    /// `true` or `false`
    Bool(bool),
    /// Integer that fits into an `i64`.
    Int(i64),
    /// Integer that does not fit into an `i64`.
    Big(Arc<num_bigint::BigInt>),
    /// Floating-point number.
    Float(f64),
    /// String.
    Text(Arc<str>),
}

/// Arithmetic operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BinaryOperator {
    /// `+`
    Add,
    /// `-`
    Subtract,
    /// `*`
    Multiply,
    /// `/`
    Divide,
    /// `//`
    FloorDivide,
    /// `%`
    Modulo,
    /// `**`
    Power,
}

/// Comparison operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CompareOperator {
    /// `==`
    Equal,
    /// `!=`
    NotEqual,
    /// `<`
    Less,
    /// `<=`
    LessEqual,
    /// `>`
    Greater,
    /// `>=`
    GreaterEqual,
    /// `in`
    In,
    /// `not in`
    NotIn,
}

/// Expression.
#[derive(Debug)]
pub(crate) enum ExpressionNode {
    /// Constant.
    Literal(LiteralValue),
    /// Variable.
    Name(NameId),
    /// `[…]`
    List(Vec<ExpressionNode>),
    /// `(…,)`
    Tuple(Vec<ExpressionNode>),
    /// `{…}`
    Dict(Vec<DictPair>),
    /// `target.name`
    Attribute(Box<ExpressionNode>, Arc<str>),
    /// `target[index]`
    Item(Box<ExpressionNode>, Box<ExpressionNode>),
    /// `target[start:stop:step]`
    Slice(Box<SliceExpression>),
    /// `target(…)`
    Call(Box<CallExpression>),
    /// `target|filter(…)`
    Filter(Box<FilterExpression>),
    /// `target is test(…)`
    Test(Box<JinjaTestExpression>),
    /// `not value`
    Not(Box<ExpressionNode>),
    /// `-value`
    Negative(Box<ExpressionNode>),
    /// `+value`
    Positive(Box<ExpressionNode>),
    /// Arithmetic.
    Binary(BinaryOperator, Box<ExpressionNode>, Box<ExpressionNode>),
    /// `left and right`
    And(Box<ExpressionNode>, Box<ExpressionNode>),
    /// `left or right`
    Or(Box<ExpressionNode>, Box<ExpressionNode>),
    /// `a ~ b ~ …`
    Concat(Vec<ExpressionNode>),
    /// `a < b < …`
    Compare(Box<ExpressionNode>, Vec<CompareOperand>),
    /// `then if test else otherwise`
    Conditional(Box<ConditionalExpression>),
}

/// Key and value of a dict literal.
#[derive(Debug)]
pub(crate) struct DictPair {
    /// Key.
    pub(crate) key: ExpressionNode,
    /// Value.
    pub(crate) value: ExpressionNode,
}

/// Slice of a sequence.
#[derive(Debug)]
pub(crate) struct SliceExpression {
    /// Sequence.
    pub(crate) target: ExpressionNode,
    /// First index.
    pub(crate) start: Option<ExpressionNode>,
    /// End of the slice: the index after the last element.
    pub(crate) stop: Option<ExpressionNode>,
    /// Step between indices.
    pub(crate) step: Option<ExpressionNode>,
}

/// Arguments of a call, a filter or a test.
#[derive(Debug, Default)]
pub(crate) struct ArgumentList {
    /// Positional arguments.
    pub(crate) positional: Vec<ExpressionNode>,
    /// Keyword arguments.
    pub(crate) keyword: Vec<KeywordArgument>,
    /// `*arguments`
    pub(crate) spread: Option<ExpressionNode>,
    /// `**arguments`
    pub(crate) spread_keyword: Option<ExpressionNode>,
}

/// Keyword argument.
#[derive(Debug)]
pub(crate) struct KeywordArgument {
    /// Name.
    pub(crate) name: Arc<str>,
    /// Value.
    pub(crate) value: ExpressionNode,
}

/// Call of a value.
#[derive(Debug)]
pub(crate) struct CallExpression {
    /// What is called.
    pub(crate) target: ExpressionNode,
    /// Arguments.
    pub(crate) arguments: ArgumentList,
}

/// Application of a filter.
#[derive(Debug)]
pub(crate) struct FilterExpression {
    /// Filtered value; `None` = the text of the enclosing filter block.
    pub(crate) target: Option<ExpressionNode>,
    /// Name.
    pub(crate) name: Arc<str>,
    /// Function; `None` if no filter has this name: evaluating the node is then an error.
    pub(crate) function: Option<FilterFunction>,
    /// Arguments.
    pub(crate) arguments: ArgumentList,
}

/// Application of a test.
#[derive(Debug)]
pub(crate) struct JinjaTestExpression {
    /// Tested value.
    pub(crate) target: ExpressionNode,
    /// Name.
    pub(crate) name: Arc<str>,
    /// Function; `None` if no test has this name: evaluating the node is then an error.
    pub(crate) function: Option<JinjaTestFunction>,
    /// Arguments.
    pub(crate) arguments: ArgumentList,
}

/// Comparison operator with its right operand.
#[derive(Debug)]
pub(crate) struct CompareOperand {
    /// Operator.
    pub(crate) operator: CompareOperator,
    /// Right operand.
    pub(crate) value: ExpressionNode,
}

/// Conditional expression.
#[derive(Debug)]
pub(crate) struct ConditionalExpression {
    /// Condition.
    pub(crate) test: ExpressionNode,
    /// Value if the condition is true.
    pub(crate) then: ExpressionNode,
    /// Value if the condition is false; `None` = undefined.
    pub(crate) otherwise: Option<ExpressionNode>,
    /// Line of the expression.
    pub(crate) line: u32,
}
