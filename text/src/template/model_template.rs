//! One compiled template of a model, with its capabilities: the message forms that it accepts, found by
//! rendering short trial conversations.

use super::super::error::TextError;
use super::capabilities::TemplateCapabilities;
use super::context::TemplateContext;
use super::conversation::adapt;
use super::engine::NamedTemplateSet;
use super::trial::TrialRenderer;
use serde_json::{Map, Value};

/// Compiled template and its capabilities.
#[derive(Debug)]
pub(super) struct AnalysedTemplate {
    engine: NamedTemplateSet,
    /// Capabilities for conversations without tools.
    plain: TemplateCapabilities,
    /// Capabilities for conversations with tools, which some templates render differently.
    with_tools: TemplateCapabilities,
}

impl AnalysedTemplate {
    /// Determines the capabilities of a compiled template by trial renderings; `variables` are the template
    /// variables of the special tokens.
    pub(super) fn new(engine: NamedTemplateSet, variables: &Map<String, Value>) -> Self {
        let capabilities =
            |tools| TemplateCapabilities::of(&TrialRenderer::new(&engine, variables, tools));
        let (plain, with_tools) = (capabilities(false), capabilities(true));
        Self { engine, plain, with_tools }
    }

    /// Returns the source of the template.
    pub(super) fn source(&self) -> Option<String> {
        self.engine.source()
    }

    /// Whether the source contains `text`.
    pub(super) fn mentions(&self, text: &str) -> bool {
        self.engine.mentions(text)
    }

    /// Whether the template has a variable of the name `name`.
    pub(super) fn has_variable(&self, name: &str) -> bool {
        self.engine.has_variable(name)
    }

    /// Whether the output of the template contains the tool definitions of a request.
    pub(super) fn shows_tools(&self) -> bool {
        self.with_tools.shows_tools
    }

    /// Whether the output of the template contains the tool calls of earlier messages. `has_tools`: the
    /// conversation defines tools.
    pub(super) fn shows_calls(&self, has_tools: bool) -> bool {
        self.capabilities(has_tools).shows_calls
    }

    /// Whether developer messages keep their role. `has_tools`: the conversation defines tools.
    pub(super) fn takes_developer(&self, has_tools: bool) -> bool {
        self.capabilities(has_tools).system_for_developer().is_none()
    }

    fn capabilities(&self, has_tools: bool) -> &TemplateCapabilities {
        if has_tools { &self.with_tools } else { &self.plain }
    }

    /// Renders a conversation after conversion to the message forms that the template takes.
    ///
    /// Errors: the template renders no messages of a role, fails, raises an exception, or exceeds a limit.
    pub(super) fn render(&self, context: &mut TemplateContext) -> Result<String, TextError> {
        let capabilities = self.capabilities(!context.variables["tools"].is_null());
        let other_arguments = std::mem::take(&mut context.other_arguments);
        let messages = &mut context.variables["messages"];
        adapt(messages, other_arguments, capabilities, |text| self.mentions(text))?;
        self.engine.render(false, &context.variables)
    }
}
