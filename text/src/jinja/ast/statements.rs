//! Statements of a template.

use super::{CallExpression, ExpressionNode, NameId};
use std::sync::Arc;

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
