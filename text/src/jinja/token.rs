//! Tokens of a template.

use std::fmt;
use std::sync::Arc;

/// Token of a template with the line where it begins.
#[derive(Debug, Clone)]
pub(crate) struct JinjaToken {
    /// Kind and value.
    pub(crate) kind: JinjaTokenValue,
    /// Line, from 1.
    pub(crate) line: u32,
}

/// Kind of a token, with its value.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum JinjaTokenValue {
    /// Text outside of tags.
    Data(Arc<str>),
    /// `{{`
    VariableBegin,
    /// `}}`
    VariableEnd,
    /// `{%`
    BlockBegin,
    /// `%}`
    BlockEnd,
    /// Name or keyword.
    Name(Arc<str>),
    /// String literal with its escapes decoded.
    Text(String),
    /// Digits of an integer literal in base 10, without underscores.
    Integer(String),
    /// Floating-point literal.
    Float(f64),
    /// Operator or bracket.
    Operator(&'static str),
    /// End of the template.
    End,
}

impl JinjaTokenValue {
    /// Whether this is the operator `text`.
    pub(crate) fn is_operator(&self, text: &str) -> bool {
        matches!(self, Self::Operator(operator) if *operator == text)
    }

    /// Whether this is the name `text`.
    pub(crate) fn is_name(&self, text: &str) -> bool {
        matches!(self, Self::Name(name) if &**name == text)
    }
}

impl fmt::Display for JinjaTokenValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Data(_) => f.write_str("template data / text"),
            Self::VariableBegin => f.write_str("begin of print statement"),
            Self::VariableEnd => f.write_str("end of print statement"),
            Self::BlockBegin => f.write_str("begin of statement block"),
            Self::BlockEnd => f.write_str("end of statement block"),
            Self::Name(name) => f.write_str(name),
            Self::Text(_) => f.write_str("string"),
            Self::Integer(_) => f.write_str("integer"),
            Self::Float(_) => f.write_str("float"),
            Self::Operator(operator) => f.write_str(operator),
            Self::End => f.write_str("end of template"),
        }
    }
}
