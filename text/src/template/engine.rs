//! Chat template engine compatible with Hugging Face transformers: compiles templates, and renders them
//! within limits on instructions, sizes of values and output bytes.

use super::super::error::TextError;
use super::super::jinja::{JinjaError, JinjaErrorKind, JinjaTemplate, RenderLimits};
use super::super::panic_guard::catch_panic;
use super::super::strftime::strftime;
use serde_json::{Map, Value};
use std::time::SystemTime;

/// Maximum number of template instructions of one rendering.
const FUEL: u64 = 500_000;

/// Maximum size in bytes of all values that a template creates in one rendering.
const VALUE_BYTES_MAX: usize = 512 << 20;

/// Name of the template engine in panic errors. No template should cause a panic; a panic is reported as an
/// ordinary error.
const ENGINE_NAME: &str = "template engine";

/// Maximum number of characters of a `raise_exception` message sent to a client: it may repeat the client's
/// input.
const EXCEPTION_CHARS_SHOWN: usize = 1_000;

/// Name of the template for conversations without tools.
const DEFAULT: &str = "default";

/// Compiled chat templates.
#[derive(Debug)]
pub(super) struct NamedTemplateSet {
    templates: Vec<NamedTemplate>,
    output_bytes_max: usize,
}

/// Compiled template with its name and source.
#[derive(Debug)]
struct NamedTemplate {
    name: String,
    source: String,
    template: JinjaTemplate,
}

impl NamedTemplateSet {
    /// Creates an engine without templates; rendering stops at `output_bytes_max` bytes.
    pub(super) fn new(output_bytes_max: usize) -> Self {
        Self { templates: Vec::new(), output_bytes_max }
    }

    /// Creates an engine with the template `text`.
    ///
    /// Errors: `InvalidRequestTemplate` if it does not compile.
    pub(super) fn of_text(text: &str, output_bytes_max: usize) -> Result<Self, TextError> {
        let mut engine = Self::new(output_bytes_max);
        engine.add(DEFAULT.to_owned(), text).map_err(TextError::InvalidRequestTemplate)?;
        Ok(engine)
    }

    /// Compiles a template and stores it under `name`.
    ///
    /// Errors: the error message of the template engine.
    pub(super) fn add(&mut self, name: String, text: &str) -> Result<(), String> {
        let compiled = catch_panic(ENGINE_NAME, || JinjaTemplate::compile(text))?;
        let template = compiled.map_err(|error| error.to_string())?;
        self.templates.retain(|known| known.name != name);
        self.templates.push(NamedTemplate { name, source: text.to_owned(), template });
        Ok(())
    }

    fn find(&self, name: &str) -> Option<&NamedTemplate> {
        self.templates.iter().find(|template| template.name == name)
    }

    /// Returns the source of the template for conversations without tools.
    pub(super) fn source(&self) -> Option<String> {
        Some(self.find(DEFAULT)?.source.clone())
    }

    /// Whether the source of one of the templates contains `text`.
    pub(super) fn mentions(&self, text: &str) -> bool {
        self.templates.iter().any(|template| template.source.contains(text))
    }

    /// Whether one of the templates has a variable of the name `name`.
    pub(super) fn has_variable(&self, name: &str) -> bool {
        self.templates.iter().any(|template| template.template.has_variable(name))
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
        let tool_template = if tools { self.find("tool_use") } else { None };
        let template = tool_template.or_else(|| self.find(DEFAULT));
        let template = template
            .ok_or_else(|| TextError::Template(format!("no template is named {DEFAULT}")))?;
        let limits = RenderLimits {
            instructions: FUEL,
            output_bytes: self.output_bytes_max,
            value_bytes: VALUE_BYTES_MAX,
        };
        let render = || template.template.render(context, limits, strftime_now);
        let rendered = catch_panic(ENGINE_NAME, render).map_err(TextError::Template)?;
        rendered.map_err(|error| self.explain(&error))
    }

    fn explain(&self, error: &JinjaError) -> TextError {
        match error.kind() {
            JinjaErrorKind::Fuel => TextError::TemplateFuelExhausted(FUEL),
            JinjaErrorKind::Output => TextError::RenderedTooLong(self.output_bytes_max),
            JinjaErrorKind::Memory => TextError::TemplateMemory(VALUE_BYTES_MAX as u64),
            JinjaErrorKind::Raised => {
                let shown = error.message().chars().take(EXCEPTION_CHARS_SHOWN);
                TextError::TemplateException(shown.collect())
            }
            _ => TextError::Template(error.to_string()),
        }
    }
}

fn strftime_now(format: &str) -> String {
    strftime(format, SystemTime::now())
}
