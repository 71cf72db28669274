//! Chat template engine compatible with Hugging Face transformers: compiles templates, and renders them
//! within limits on instructions and output bytes.

use super::super::error::TextError;
use super::super::panic_guard::catch_panic;
use super::super::python_json::tojson;
use super::super::strftime::strftime;
use minijinja::value::{Kwargs, Value as Jinja, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State};
use serde_json::{Map, Value};
use std::io;
use std::time::SystemTime;

/// Maximum number of template instructions of one rendering.
const FUEL: u64 = 500_000;

/// Name of the minijinja crate in panic errors. minijinja 2.24 panics when some templates reverse an empty
/// string, and when it formats some errors; a template that causes a panic fails with an ordinary error.
const ENGINE_NAME: &str = "template engine";

/// Maximum number of characters of a `raise_exception` message sent to a client: it may repeat the client's
/// input.
const EXCEPTION_CHARS_SHOWN: usize = 1_000;

/// Name of the template for conversations without tools.
const DEFAULT: &str = "default";

/// Compiled chat templates.
#[derive(Debug)]
pub(super) struct TemplateEngine {
    environment: Environment<'static>,
    output_bytes_max: usize,
}

impl TemplateEngine {
    /// Creates an engine without templates; rendering stops at `output_bytes_max` bytes.
    pub(super) fn new(output_bytes_max: usize) -> Self {
        Self { environment: environment(), output_bytes_max }
    }

    /// Creates an engine with the template `text`.
    ///
    /// Errors: `InvalidRequestTemplate` if it does not compile.
    pub(super) fn of_text(text: &str, output_bytes_max: usize) -> Result<Self, TextError> {
        let mut engine = Self::new(output_bytes_max);
        engine.add(DEFAULT.to_owned(), text).map_err(TextError::InvalidRequestTemplate)?;
        Ok(engine)
    }

    /// Compiles a template under a name.
    ///
    /// Errors: the message of the template engine.
    pub(super) fn add(&mut self, name: String, text: &str) -> Result<(), String> {
        let text = without_generation_tags(text);
        let add = || self.environment.add_template_owned(name, text);
        catch_panic(ENGINE_NAME, || add().map_err(|error| format!("{error:#}")))
            .and_then(|added| added)
    }

    /// Returns the source of the template for conversations without tools.
    pub(super) fn source(&self) -> Option<String> {
        let template = self.environment.get_template(DEFAULT).ok()?;
        Some(template.source().to_owned())
    }

    /// Whether the source of one of the templates contains `text`.
    pub(super) fn mentions(&self, text: &str) -> bool {
        self.environment.templates().any(|(_, template)| template.source().contains(text))
    }

    /// Renders the template for conversations with tools if it exists and `tools` is set, else the default
    /// template.
    ///
    /// Errors: the template fails, raises an exception, or exceeds a limit.
    pub(super) fn render(
        &self,
        tools: bool,
        context: &Map<String, Value>,
    ) -> Result<String, TextError> {
        let tool_template =
            if tools { self.environment.get_template("tool_use").ok() } else { None };
        let template = tool_template.map_or_else(|| self.environment.get_template(DEFAULT), Ok);
        let template = template.map_err(|e| TextError::Template(e.to_string()))?;
        let mut out = CappedOutput { bytes: Vec::new(), max: self.output_bytes_max, full: false };
        let render = || {
            let rendered = template.render_captured_to(context, &mut out);
            rendered.map(drop).map_err(|e| explain(&e))
        };
        if let Err(error) = catch_panic(ENGINE_NAME, render).map_err(TextError::Template)? {
            let max = self.output_bytes_max;
            return Err(if out.full { TextError::RenderedTooLong(max) } else { error });
        }
        String::from_utf8(out.bytes).map_err(|e| TextError::Template(e.to_string()))
    }
}

/// Creates a Jinja environment compatible with transformers.
fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_fuel(Some(FUEL));
    // minijinja's debug errors would format all variables, which overflows the stack if a namespace contains
    // itself.
    environment.set_debug(false);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.set_formatter(python_formatter);
    environment.add_filter("tojson", |value: Jinja, kwargs: Kwargs| tojson(&value, &kwargs));
    environment.add_function("raise_exception", |text: String| -> Result<Jinja, Error> {
        let raised = Error::new(ErrorKind::InvalidOperation, "raise_exception");
        Err(raised.with_source(RaisedException(text)))
    });
    environment.add_function("strftime_now", |format: String| strftime(&format, SystemTime::now()));
    environment
}

/// Maximum nesting depth of values that are formatted: minijinja uses stack for each level, and a Jinja
/// namespace may contain itself.
const DEPTH_MAX: usize = 256;

/// Maximum number of values visited to determine the depth of one value; with more, it counts as too deep.
const VALUES_VISITED_MAX: usize = 1 << 20;

/// Whether containers in `value` are nested at most `levels` deep.
fn is_shallow(value: &Jinja, levels: usize, visits_left: &mut usize) -> bool {
    let is_map = value.kind() == ValueKind::Map;
    if !is_map && value.kind() != ValueKind::Seq {
        return true;
    }
    let Ok(items) = value.try_iter() else { return true };
    let mut items = items.map(|item| if is_map { value.get_item(&item) } else { Ok(item) });
    items.all(|item| {
        *visits_left = visits_left.saturating_sub(1);
        *visits_left > 0
            && levels > 0
            && item.is_ok_and(|item| is_shallow(&item, levels - 1, visits_left))
    })
}

/// Formats constants as Python does: `None`, `True` and `False`.
fn python_formatter(
    out: &mut Output<'_>,
    state: &State<'_, '_>,
    value: &Jinja,
) -> Result<(), Error> {
    if !is_shallow(value, DEPTH_MAX, &mut { VALUES_VISITED_MAX }) {
        return Err(Error::new(ErrorKind::InvalidOperation, "nested too deeply to be written"));
    }
    let word = match value.kind() {
        ValueKind::None => "None",
        ValueKind::Bool if value.is_true() => "True",
        ValueKind::Bool => "False",
        _ => return minijinja::escape_formatter(out, state, value),
    };
    out.write_str(word).map_err(Error::from)
}

/// Message that a template passed to `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct RaisedException(String);

fn explain(error: &Error) -> TextError {
    if error.kind() == ErrorKind::OutOfFuel {
        return TextError::TemplateFuelExhausted(FUEL);
    }
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(cause) = source {
        if let Some(RaisedException(text)) = cause.downcast_ref() {
            return TextError::TemplateException(
                text.chars().take(EXCEPTION_CHARS_SHOWN).collect(),
            );
        }
        if cause.downcast_ref::<Error>().is_some_and(|e| e.kind() == ErrorKind::OutOfFuel) {
            return TextError::TemplateFuelExhausted(FUEL);
        }
        source = cause.source();
    }
    TextError::Template(format!("{error:#}"))
}

/// Collects the rendered text; fails at the maximum size.
struct CappedOutput {
    bytes: Vec<u8>,
    max: usize,
    full: bool,
}

impl io::Write for CappedOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + bytes.len() > self.max {
            self.full = true;
            return Err(io::Error::other("output limit"));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Replaces `{% generation %}`, which only selects text for training, by a block that is always rendered. The
/// whitespace control of its tags is preserved.
fn without_generation_tags(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(open) = rest.find("{%") {
        // The search starts after `{%`: in `{%}`, one `%` cannot belong to both delimiters.
        let Some(length) = rest[open + 2..].find("%}") else { break };
        let close = open + 2 + length;
        let tag = &rest[open + 2..close];
        let word = tag.trim_matches(['-', '+', ' ', '\t', '\n', '\r']);
        out.push_str(&rest[..open + 2]);
        match word {
            "generation" => out.push_str(&tag.replace(word, "if true")),
            "endgeneration" => out.push_str(&tag.replace(word, "endif")),
            _ => out.push_str(tag),
        }
        out.push_str("%}");
        rest = &rest[close + 2..];
    }
    out.push_str(rest);
    out
}
