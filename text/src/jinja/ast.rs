//! Syntax tree of a template. The tree is shared between threads, so it contains no render-time values.

use super::filters::FilterFunction;
use super::value_tests::JinjaTestFunction;
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

/// Target of an assignment.
#[derive(Debug)]
pub(crate) enum AssignTarget {
    /// Variable.
    Name(NameId),
    /// Attribute of a namespace.
    Attribute(NameId, Arc<str>),
    /// Targets to which the items of a sequence are assigned.
    Tuple(Vec<AssignTarget>),
}

/// Statement with its line.
#[derive(Debug)]
pub(crate) struct StatementNode {
    /// Statement.
    pub(crate) statement: JinjaStatement,
    /// Line, from 1.
    pub(crate) line: u32,
}

/// Statements of a block.
pub(crate) type StatementList = Vec<StatementNode>;

/// Statement.
#[derive(Debug)]
pub(crate) enum JinjaStatement {
    /// Text outside of tags.
    Data(Arc<str>),
    /// `{{ value }}`
    Print(ExpressionNode),
    /// `{% for %}`
    For(Arc<ForNode>),
    /// `{% if %}` and each `{% elif %}`, with the statements of `{% else %}`.
    If(Vec<IfBranch>, StatementList),
    /// `{% set target = value %}`
    Set(AssignTarget, ExpressionNode),
    /// `{% set target %}…{% endset %}`
    SetBlock(AssignTarget, Option<ExpressionNode>, StatementList),
    /// `{% macro %}`
    Macro(NameId, Arc<MacroNode>),
    /// `{% call %}`
    CallBlock(Arc<MacroNode>, CallExpression),
    /// `{% generation %}`, a tag that transformers adds to Jinja2. Its statements are rendered in a new
    /// scope.
    Generation(Arc<MacroNode>),
    /// `{% filter %}`
    FilterBlock(ExpressionNode, StatementList),
    /// `{% with %}`
    With(Vec<WithVariable>, StatementList),
    /// `{% block %}`
    Block(Arc<BlockNode>),
    /// `{% autoescape %}`
    Autoescape(ExpressionNode, StatementList),
    /// `{% break %}`
    Break,
    /// `{% continue %}`
    Continue,
    /// `{% include %}`, `{% import %}`, `{% from %}` or `{% extends %}`; they fail when executed, because
    /// templates have no loader in transformers.
    LoadTemplate(ExpressionNode),
}

/// Condition with its statements.
#[derive(Debug)]
pub(crate) struct IfBranch {
    /// Condition.
    pub(crate) test: ExpressionNode,
    /// Statements.
    pub(crate) body: StatementList,
}

/// Loop.
#[derive(Debug)]
pub(crate) struct ForNode {
    /// Variables of the items.
    pub(crate) target: AssignTarget,
    /// Iterated value.
    pub(crate) iterable: ExpressionNode,
    /// Condition of the items.
    pub(crate) test: Option<ExpressionNode>,
    /// Statements for each item.
    pub(crate) body: StatementList,
    /// Statements of `{% else %}`, executed if no iteration reaches the end of the body.
    pub(crate) otherwise: StatementList,
    /// Whether the loop is declared `recursive`, so that `loop(items)` renders the body for other items.
    pub(crate) is_recursive: bool,
    /// Whether the body uses `loop`.
    pub(crate) uses_loop: bool,
}

/// Macro, or the body of a `{% call %}` block.
#[derive(Debug)]
pub(crate) struct MacroNode {
    /// Name of the macro; `None` for the body of a `{% call %}` block.
    pub(crate) name: Option<Arc<str>>,
    /// Parameters.
    pub(crate) parameters: Vec<MacroParameter>,
    /// Statements.
    pub(crate) body: StatementList,
    /// Which of the special parameters (`caller`, `kwargs`, `varargs`) the body uses.
    pub(crate) uses: UsedSpecialParameters,
}

/// Which of the special parameters `caller`, `kwargs` and `varargs` the body of a macro uses.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct UsedSpecialParameters {
    /// `caller`
    pub(crate) caller: bool,
    /// `kwargs`
    pub(crate) kwargs: bool,
    /// `varargs`
    pub(crate) varargs: bool,
}

/// Parameter of a macro.
#[derive(Debug)]
pub(crate) struct MacroParameter {
    /// Variable.
    pub(crate) id: NameId,
    /// Name.
    pub(crate) name: Arc<str>,
    /// Default value, used if a call has no argument for the parameter.
    pub(crate) default: Option<ExpressionNode>,
}

/// Variable that a `{% with %}` block defines.
#[derive(Debug)]
pub(crate) struct WithVariable {
    /// Target.
    pub(crate) target: AssignTarget,
    /// Value.
    pub(crate) value: ExpressionNode,
}

/// Named block.
#[derive(Debug)]
pub(crate) struct BlockNode {
    /// Name.
    pub(crate) name: Arc<str>,
    /// Whether the block is `scoped`: it can read the variables of the enclosing scope.
    pub(crate) is_scoped: bool,
    /// Whether the block is `required`: a child template must override it.
    pub(crate) is_required: bool,
    /// Statements.
    pub(crate) body: StatementList,
}
