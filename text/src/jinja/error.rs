//! Errors of templates: equivalents of the Python exceptions that Jinja2 raises, and exceeded rendering
//! limits.

use std::fmt;

/// Kind of an error, named after the Python exception that Jinja2 raises.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum JinjaErrorKind {
    /// The template text is invalid.
    Syntax,
    /// An undefined value is used (`UndefinedError`).
    Undefined,
    /// `TypeError`.
    Type,
    /// `ValueError`.
    Value,
    /// `OverflowError`.
    Overflow,
    /// `LookupError` and its subclasses.
    Lookup,
    /// The sandbox rejects an access (`SecurityError`).
    Security,
    /// Another error of the template (`TemplateRuntimeError`, `ZeroDivisionError`).
    Runtime,
    /// The template uses an unsupported feature of Jinja2, or one whose output differs between runs of
    /// Python, such as the order of a set.
    Unsupported,
    /// The template called `raise_exception`.
    Raised,
    /// The rendering exceeds its instruction limit.
    Fuel,
    /// The rendered text exceeds its maximum size.
    Output,
    /// The values that the template creates exceed their maximum total size.
    Memory,
    /// Calls, statements or values are nested too deeply.
    Depth,
}

/// Error of a template, with the line where it occurred.
#[derive(Debug, Clone)]
pub(crate) struct JinjaError(Box<JinjaErrorDetails>);

/// Contents of a `JinjaError`.
#[derive(Debug, Clone)]
struct JinjaErrorDetails {
    kind: JinjaErrorKind,
    message: String,
    line: Option<u32>,
}

/// Result of an operation of the template engine.
pub(crate) type JinjaResult<T> = Result<T, JinjaError>;

impl JinjaError {
    /// Creates an error whose line is not known yet.
    pub(crate) fn new(kind: JinjaErrorKind, message: impl Into<String>) -> Self {
        Self(Box::new(JinjaErrorDetails { kind, message: message.into(), line: None }))
    }

    /// Creates a `TypeError`.
    pub(crate) fn type_error(message: impl Into<String>) -> Self {
        Self::new(JinjaErrorKind::Type, message)
    }

    /// Creates a `ValueError`.
    pub(crate) fn value_error(message: impl Into<String>) -> Self {
        Self::new(JinjaErrorKind::Value, message)
    }

    /// Creates an error of the kind `Runtime`.
    pub(crate) fn runtime(message: impl Into<String>) -> Self {
        Self::new(JinjaErrorKind::Runtime, message)
    }

    /// Creates an error for a feature whose output cannot equal that of transformers.
    pub(crate) fn unsupported(message: impl Into<String>) -> Self {
        Self::new(JinjaErrorKind::Unsupported, message)
    }

    /// Creates a syntax error at a line of the template.
    pub(crate) fn syntax(message: impl Into<String>, line: u32) -> Self {
        Self::new(JinjaErrorKind::Syntax, message).at_line(line)
    }

    /// Sets the line of the error, unless the line is already known from a nested statement.
    pub(crate) fn at_line(mut self, line: u32) -> Self {
        self.0.line.get_or_insert(line);
        self
    }

    /// Returns the kind of the error.
    pub(crate) fn kind(&self) -> JinjaErrorKind {
        self.0.kind
    }

    /// Returns the message without the line.
    pub(crate) fn message(&self) -> &str {
        &self.0.message
    }
}

impl fmt::Display for JinjaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)?;
        match self.0.line {
            Some(line) => write!(f, " (line {line})"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for JinjaError {}
