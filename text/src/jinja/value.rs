//! Values of a rendering. Strings, lists, tuples and dicts are immutable: the sandbox of transformers rejects
//! the methods that change them. Namespaces, cyclers, joiners and loops are mutable.

mod containers;

use super::dict::{DictValue, DictView};
use super::error::{JinjaError, JinjaErrorKind, JinjaResult};
use super::iteration::IteratorValue;
use super::loop_state::LoopValue;
pub(crate) use containers::{
    BoundMethod, CyclerValue, JinjaSequence, JoinerValue, MacroValue, NamespaceValue, RangeValue,
    SpecialVariableIds, depth_around,
};
use num_bigint::BigInt;
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
    List(Rc<JinjaSequence>),
    /// Tuple.
    Tuple(Rc<JinjaSequence>),
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
        Ok(Self::List(JinjaSequence::new(items)?))
    }

    /// Creates a tuple.
    pub(crate) fn tuple(items: Vec<Self>) -> JinjaResult<Self> {
        Ok(Self::Tuple(JinjaSequence::new(items)?))
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
