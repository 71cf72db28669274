//! Values of a rendering. Strings, lists, tuples and dicts are immutable: the sandbox of transformers rejects
//! the methods that change them. Namespaces, cyclers, joiners and loops are mutable.

use super::ast::{MacroNode, NameId};
use super::dict::{DictValue, DictView};
use super::error::{JinjaError, JinjaErrorKind, JinjaResult};
use super::iteration::IteratorValue;
use super::loop_state::LoopValue;
use super::methods::MethodFunction;
use super::scope::VariableScope;
use num_bigint::BigInt;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

/// Maximum nesting of lists, tuples, dicts and iterators. Creating a deeper value is an error, so no
/// operation on values can overflow the stack.
pub(crate) const VALUE_DEPTH_MAX: u16 = 200;

/// Value of a template variable or an expression.
#[derive(Debug, Clone)]
pub(crate) enum JinjaValue {
    /// Undefined value, with its cause.
    Undefined(Rc<UndefinedValue>),
    /// `none`
    None,
    /// `true` or `false`
    Bool(bool),
    /// Integer of 64 bits.
    Int(i64),
    /// Integer that does not fit in 64 bits.
    Big(Rc<BigInt>),
    /// Floating-point number.
    Float(f64),
    /// String.
    Str(Arc<str>),
    /// String marked as safe (`Markup`).
    Markup(Arc<str>),
    /// Bytes.
    Bytes(Rc<[u8]>),
    /// List.
    List(Rc<SequenceValue>),
    /// Tuple.
    Tuple(Rc<SequenceValue>),
    /// Dict.
    Dict(Rc<DictValue>),
    /// Keys, values or items of a dict.
    View(Rc<DictView>),
    /// Range of integers.
    Range(RangeValue),
    /// Iterator that can be consumed once.
    Iterator(Rc<IteratorValue>),
    /// Namespace.
    Namespace(Rc<NamespaceValue>),
    /// Macro.
    Macro(Rc<MacroValue>),
    /// `loop`
    Loop(Rc<LoopValue>),
    /// Cycler.
    Cycler(Rc<CyclerValue>),
    /// Joiner.
    Joiner(Rc<JoinerValue>),
    /// Method of a value.
    Method(Rc<BoundMethod>),
    /// Function of the environment.
    Function(BuiltinFunction),
    /// `self`, whose attributes are the blocks of the template.
    TemplateBlocks,
    /// Named block of the template; calling the value renders the block.
    Block(Arc<str>),
}

/// Global function that every template can call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BuiltinFunction {
    /// `range`
    Range,
    /// `dict`
    Dict,
    /// `namespace`
    Namespace,
    /// `cycler`
    Cycler,
    /// `joiner`
    Joiner,
    /// `lipsum`
    Lipsum,
    /// `raise_exception`
    RaiseException,
    /// `strftime_now`
    StrftimeNow,
}

/// Undefined value, with one variant per cause. The cause determines the error message when a template uses
/// the value.
#[derive(Debug)]
pub(crate) enum UndefinedValue {
    /// No variable has this name.
    Name(Arc<str>),
    /// A value of this type has no such attribute.
    Attribute(&'static str, Arc<str>),
    /// A value of this type has no such element.
    Element(&'static str, String),
    /// Another cause.
    Hint(String),
    /// The sandbox rejects this attribute of a value of this type.
    Unsafe(&'static str, Arc<str>),
}

impl UndefinedValue {
    /// Returns the error for a use of this undefined value.
    pub(crate) fn error(&self) -> JinjaError {
        let message = match self {
            Self::Name(name) => format!("'{name}' is undefined"),
            Self::Attribute(kind, name) => format!("'{kind}' has no attribute '{name}'"),
            Self::Element(kind, index) => format!("{kind} has no element {index}"),
            Self::Hint(hint) => hint.clone(),
            Self::Unsafe(kind, name) => {
                let message = format!("access to attribute '{name}' of '{kind}' object is unsafe.");
                return JinjaError::new(JinjaErrorKind::Security, message);
            }
        };
        JinjaError::new(JinjaErrorKind::Undefined, message)
    }
}

/// Items of a list or a tuple.
#[derive(Debug)]
pub(crate) struct SequenceValue {
    /// Items.
    pub(crate) items: Vec<JinjaValue>,
    /// Nesting of the items.
    depth: u16,
    /// Whether this is a group of the filter `groupby`, whose items have the names `grouper` and `list`.
    pub(crate) is_group: bool,
}

/// Range of integers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RangeValue {
    /// First integer.
    pub(crate) start: i64,
    /// Exclusive end of the range.
    pub(crate) stop: i64,
    /// Difference of successive integers.
    pub(crate) step: i64,
}

impl RangeValue {
    /// Number of integers in the range.
    pub(crate) fn len(self) -> u64 {
        let (start, stop, step) =
            (i128::from(self.start), i128::from(self.stop), i128::from(self.step));
        let span = if step > 0 { stop - start } else { start - stop };
        if span <= 0 { 0 } else { ((span - 1) / step.abs() + 1) as u64 }
    }

    /// Returns the integer at `index`, which is below the length.
    pub(crate) fn at(self, index: u64) -> i64 {
        (i128::from(self.start) + i128::from(self.step) * i128::from(index)) as i64
    }

    /// Returns the index of `number` in the range; `None` if the range does not contain `number`.
    pub(crate) fn position(self, number: i64) -> Option<u64> {
        let distance = i128::from(number) - i128::from(self.start);
        let step = i128::from(self.step);
        let index = distance / step;
        (distance % step == 0 && index >= 0 && index < i128::from(self.len()))
            .then_some(index as u64)
    }
}

/// Namespace: the only value whose attributes a template can assign.
#[derive(Debug)]
pub(crate) struct NamespaceValue {
    /// Attributes.
    pub(crate) attributes: RefCell<DictValue>,
}

/// Macro with its defining scope.
#[derive(Debug)]
pub(crate) struct MacroValue {
    /// Parameters and statements.
    pub(crate) node: Arc<MacroNode>,
    /// Scope of the definition.
    pub(crate) scope: VariableScope,
    /// Name ids of the special parameters `caller`, `kwargs` and `varargs`.
    pub(crate) special: SpecialVariableIds,
}

/// Name ids of the special variables `caller`, `kwargs`, `varargs` and `loop`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SpecialVariableIds {
    /// `caller`
    pub(crate) caller: NameId,
    /// `kwargs`
    pub(crate) kwargs: NameId,
    /// `varargs`
    pub(crate) varargs: NameId,
    /// `loop`
    pub(crate) loop_object: NameId,
}

/// Object that the template function `cycler` returns: it yields its items in rotation.
#[derive(Debug)]
pub(crate) struct CyclerValue {
    /// Items, at least one.
    pub(crate) items: Rc<SequenceValue>,
    /// Index of the item that the cycler returns as its current item.
    pub(crate) position: Cell<usize>,
}

/// Object that the template function `joiner` returns: it yields a separator on each call except the first.
#[derive(Debug)]
pub(crate) struct JoinerValue {
    /// Separator, which every call except the first returns.
    pub(crate) separator: JinjaValue,
    /// Whether the joiner has been called.
    pub(crate) used: Cell<bool>,
}

/// Method of a value.
#[derive(Debug)]
pub(crate) struct BoundMethod {
    /// Value.
    pub(crate) receiver: JinjaValue,
    /// Function.
    pub(crate) function: MethodFunction,
}

impl SequenceValue {
    /// Creates a sequence.
    ///
    /// Errors: the items are nested too deeply.
    pub(crate) fn new(items: Vec<JinjaValue>) -> JinjaResult<Rc<Self>> {
        let depth = depth_around(items.iter())?;
        Ok(Rc::new(Self { items, depth, is_group: false }))
    }

    /// Creates a group of the filter `groupby`.
    pub(crate) fn group(grouper: JinjaValue, list: JinjaValue) -> JinjaResult<Rc<Self>> {
        let items = vec![grouper, list];
        let depth = depth_around(items.iter())?;
        Ok(Rc::new(Self { items, depth, is_group: true }))
    }
}

/// Returns the nesting depth of a container of `items`.
///
/// Errors: the depth exceeds its maximum.
pub(crate) fn depth_around<'a>(items: impl Iterator<Item = &'a JinjaValue>) -> JinjaResult<u16> {
    let depth = items.map(JinjaValue::depth).max().unwrap_or(0) + 1;
    if depth > VALUE_DEPTH_MAX {
        return Err(JinjaError::new(JinjaErrorKind::Depth, "values are nested too deeply"));
    }
    Ok(depth)
}

impl JinjaValue {
    /// Creates a string.
    pub(crate) fn text(text: impl Into<Arc<str>>) -> Self {
        Self::Str(text.into())
    }

    /// Creates a string of the same type as `like`: a `Markup` string if `like` is one, else a plain string.
    pub(crate) fn text_like(like: &Self, text: impl Into<Arc<str>>) -> Self {
        if matches!(like, Self::Markup(_)) {
            Self::Markup(text.into())
        } else {
            Self::Str(text.into())
        }
    }

    /// Creates a list.
    pub(crate) fn list(items: Vec<Self>) -> JinjaResult<Self> {
        Ok(Self::List(SequenceValue::new(items)?))
    }

    /// Creates a tuple.
    pub(crate) fn tuple(items: Vec<Self>) -> JinjaResult<Self> {
        Ok(Self::Tuple(SequenceValue::new(items)?))
    }

    /// Creates a dict.
    pub(crate) fn dict(dict: DictValue) -> Self {
        Self::Dict(Rc::new(dict))
    }

    /// Creates an undefined value with the error message `hint`, for a cause other than a missing name or
    /// attribute.
    pub(crate) fn undefined(hint: impl Into<String>) -> Self {
        Self::Undefined(Rc::new(UndefinedValue::Hint(hint.into())))
    }

    /// Returns the nesting depth of containers in the value. A namespace has depth 0: the evaluator keeps
    /// every namespace alive until the rendering ends, so dropping a value never recurses into a namespace.
    pub(crate) fn depth(&self) -> u16 {
        match self {
            Self::List(sequence) | Self::Tuple(sequence) => sequence.depth,
            Self::Dict(dict) => dict.depth(),
            Self::View(view) => view.dict.depth() + 1,
            Self::Iterator(iterator) => iterator.depth(),
            Self::Loop(state) => state.depth(),
            Self::Cycler(cycler) => cycler.items.depth + 1,
            Self::Joiner(joiner) => joiner.separator.depth() + 1,
            Self::Method(method) => method.receiver.depth() + 1,
            _ => 0,
        }
    }

    /// Returns the text of a plain or `Markup` string; `None` for any other value.
    pub(crate) fn as_str(&self) -> Option<&str> {
        self.as_text().map(|text| &**text)
    }

    /// Returns the reference-counted text of a plain or `Markup` string; `None` for any other value.
    pub(crate) fn as_text(&self) -> Option<&Arc<str>> {
        match self {
            Self::Str(text) | Self::Markup(text) => Some(text),
            _ => None,
        }
    }

    /// Whether the value is undefined.
    pub(crate) fn is_undefined(&self) -> bool {
        matches!(self, Self::Undefined(_))
    }

    /// Whether the value is true in a condition.
    pub(crate) fn is_true(&self) -> bool {
        match self {
            Self::Undefined(_) | Self::None => false,
            Self::Bool(value) => *value,
            Self::Int(number) => *number != 0,
            Self::Float(number) => *number != 0.0,
            Self::Str(text) | Self::Markup(text) => !text.is_empty(),
            Self::Bytes(bytes) => !bytes.is_empty(),
            Self::List(sequence) | Self::Tuple(sequence) => !sequence.items.is_empty(),
            Self::Dict(dict) => dict.len() > 0,
            Self::View(view) => view.dict.len() > 0,
            Self::Range(range) => range.len() > 0,
            _ => true,
        }
    }

    /// Name of the Python type.
    pub(crate) fn type_name(&self) -> &'static str {
        match self {
            Self::Undefined(_) => "Undefined",
            Self::None => "NoneType",
            Self::Bool(_) => "bool",
            Self::Int(_) | Self::Big(_) => "int",
            Self::Float(_) => "float",
            Self::Str(_) => "str",
            Self::Markup(_) => "Markup",
            Self::Bytes(_) => "bytes",
            Self::List(_) => "list",
            Self::Tuple(_) => "tuple",
            Self::Dict(_) => "dict",
            Self::View(view) => view.type_name(),
            Self::Range(_) => "range",
            Self::Iterator(_) => "generator",
            Self::Namespace(_) => "Namespace",
            Self::Macro(_) => "Macro",
            Self::Loop(_) => "LoopContext",
            Self::Cycler(_) => "Cycler",
            Self::Joiner(_) => "Joiner",
            Self::Method(_) => "builtin_function_or_method",
            Self::Function(_) => "function",
            Self::TemplateBlocks => "TemplateReference",
            Self::Block(_) => "BlockReference",
        }
    }

    /// Returns the description of the value's type for messages about undefined values.
    pub(crate) fn object_name(&self) -> &'static str {
        match self {
            Self::None => "None",
            Self::Bool(_) => "bool object",
            Self::Int(_) | Self::Big(_) => "int object",
            Self::Float(_) => "float object",
            Self::Str(_) => "str object",
            Self::Markup(_) => "markupsafe.Markup object",
            Self::List(_) => "list object",
            Self::Tuple(_) => "tuple object",
            Self::Dict(_) => "dict object",
            Self::Namespace(_) => "jinja2.utils.Namespace object",
            Self::Macro(_) => "jinja2.runtime.Macro object",
            Self::Loop(_) => "jinja2.runtime.LoopContext object",
            other => other.type_name(),
        }
    }
}
