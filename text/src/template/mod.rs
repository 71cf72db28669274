//! Chat template of a model folder or of a request: renders messages to the text of a prompt.
//!
//! Rendering follows `apply_chat_template` of transformers 5 (Jinja2 with `trim_blocks` and `lstrip_blocks`,
//! `tojson` as Python writes JSON, `raise_exception`, `strftime_now`, loop controls, `{% generation %}`
//! ignored) and is limited in instructions and output. The templates of a model are compiled once at startup.
//! The template of a request is rendered by a child process with limits on memory and CPU time:
//! `request_template.rs`.
//!
//! Templates take messages in different forms. Trial renderings determine the forms that a template takes
//! (`trial.rs`, `capabilities.rs`), and messages are converted to these forms (`conversation.rs`).

mod capabilities;
mod child;
mod context;
mod conversation;
mod engine;
mod hidden_field;
mod inline_system;
mod message;
mod metadata_calls;
mod model_template;
mod request_template;
mod source;
mod trial;

pub use child::serve as serve_templates;
pub use hidden_field::HiddenChatField;
pub use request_template::RequestTemplateRenderer;

use super::error::{TextError, TextLoadError};
use super::tokenizer::Tokenizer;
use context::SpecialTokens;
use engine::NamedTemplateSet;
use model_template::AnalysedTemplate;
use serde_json::{Map, Value};
use source::{DEFAULT_NAME, TemplateSource};
use std::collections::BTreeMap;
use std::path::Path;

/// Maximum size of a template file in bytes.
pub const TEMPLATE_BYTES_MAX: usize = 1 << 20;

/// Name of the template for conversations with tools.
const TOOL_USE_NAME: &str = "tool_use";

/// Template variable that contains the reasoning effort of a request.
const REASONING_EFFORT: &str = "reasoning_effort";

/// Input of a chat template. Special tokens in its strings, except in `template`, remain plain text.
#[derive(Debug, Clone, Default)]
pub struct ChatInput {
    /// Chat template sent in the request, or the name of one of the model's templates; `None` selects one of
    /// the model's templates automatically.
    pub template: Option<String>,
    /// Messages: a JSON array of objects as in the request. Content is a string, or a list of parts of type
    /// `text`; tool call arguments are an object or the JSON text of an object.
    pub messages: Value,
    /// Tool definitions as in the request, or null.
    pub tools: Value,
    /// Documents (for retrieval-augmented generation) as in the request, or null.
    pub documents: Value,
    /// Whether the prompt ends with the opening of an assistant turn.
    pub add_generation_prompt: bool,
    /// Whether the end of the last message is omitted, so that the model continues this message.
    pub continue_final_message: bool,
    /// `chat_template_kwargs` of the request, merged with the server's defaults.
    pub kwargs: Map<String, Value>,
}

/// Text of a prompt, and the positions at which user text contains (part of) a special token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RenderedChat {
    /// Text of the prompt.
    pub text: String,
    /// Byte positions in `text`, in ascending order, of user text that must not become part of a special
    /// token.
    pub(super) protected_positions: Vec<usize>,
}

/// Compiled chat templates of one model.
#[derive(Debug)]
pub struct ChatTemplate {
    templates: BTreeMap<String, AnalysedTemplate>,
    special_tokens: SpecialTokens,
}

impl ChatTemplate {
    /// Compiles the template of the model folder `dir`, or `chosen` (value of `--chat-template`: the path of
    /// a file, or the template itself). `Ok(None)` if there is no template: chat requests are then rejected.
    ///
    /// The templates are read from `chat_template.jinja` and `additional_chat_templates`, from
    /// `chat_template.json` or from `tokenizer_config.json`, in this order of precedence; a list of named
    /// templates is supported. Rendering stops at `output_bytes_max` bytes.
    pub fn load(
        dir: &Path,
        chosen: Option<&str>,
        tokenizer: &Tokenizer,
        output_bytes_max: usize,
    ) -> Result<Option<Self>, TextLoadError> {
        let sources = match chosen {
            Some(chosen) => vec![TemplateSource::chosen(chosen)?],
            None => TemplateSource::of_model(dir)?,
        };
        if sources.is_empty() {
            return Ok(None);
        }
        let special_tokens = SpecialTokens::new(tokenizer)
            .map_err(|reason| TextLoadError::Invalid { path: dir.to_owned(), reason })?;
        let variables = special_tokens.variables();
        let mut templates = BTreeMap::new();
        for TemplateSource { name, text, path } in sources {
            let invalid = |reason: String| TextLoadError::Invalid { path, reason };
            if text.len() > TEMPLATE_BYTES_MAX {
                return Err(invalid(format!("chat template exceeds {TEMPLATE_BYTES_MAX} bytes")));
            }
            let mut engine = NamedTemplateSet::new(output_bytes_max);
            let added = engine.add(DEFAULT_NAME.to_owned(), &text);
            added.map_err(|reason| invalid(format!("chat template: {reason}")))?;
            templates.insert(name, AnalysedTemplate::new(engine, &variables));
        }
        let template = Self { templates, special_tokens };
        if template.select(None, true).is_ok_and(|selected| !selected.shows_tools()) {
            tracing::warn!("the chat template shows no tools: the model does not see `tools`");
        }
        Ok(Some(template))
    }

    /// Compiles the template `text` in this process. It must be trusted, because the memory that rendering
    /// takes is not limited.
    ///
    /// Errors: the template is invalid.
    pub fn of_text(
        text: &str,
        tokenizer: &Tokenizer,
        output_bytes_max: usize,
    ) -> Result<Self, TextError> {
        let engine = NamedTemplateSet::of_text(text, output_bytes_max)?;
        let special_tokens = SpecialTokens::new(tokenizer).map_err(TextError::Template)?;
        let template = AnalysedTemplate::new(engine, &special_tokens.variables());
        Ok(Self {
            templates: BTreeMap::from([(DEFAULT_NAME.to_owned(), template)]),
            special_tokens,
        })
    }

    /// Returns the source of the template for conversations without tools.
    pub fn source(&self) -> Option<String> {
        self.templates.get(DEFAULT_NAME).and_then(AnalysedTemplate::source)
    }

    /// Whether the source of one of the model's templates contains `text`.
    pub fn mentions(&self, text: &str) -> bool {
        self.templates.values().any(|template| template.mentions(text))
    }

    /// Whether the template for conversations with or without tools has a variable of the name `name`.
    pub fn reads_variable(&self, name: &str, has_tools: bool) -> bool {
        self.select(None, has_tools).is_ok_and(|template| template.has_variable(name))
    }

    /// Whether developer messages of conversations with or without tools keep their role, because the template
    /// shows them; otherwise they become system messages.
    pub fn takes_developer(&self, has_tools: bool) -> bool {
        self.select(None, has_tools).is_ok_and(|template| template.takes_developer(has_tools))
    }

    /// Whether `name` is the name of one of several templates of the model.
    pub fn has_named(&self, name: &str) -> bool {
        self.templates.len() > 1 && self.templates.contains_key(name)
    }

    /// Returns the fields of a conversation that the template does not read.
    pub fn hidden_fields(&self, input: &ChatInput, has_tools: bool) -> Vec<HiddenChatField> {
        let name = input.template.as_deref();
        if name.is_some_and(|name| !self.has_named(name)) {
            return Vec::new();
        }
        let Ok(template) = self.select(name, has_tools) else { return Vec::new() };
        let mut messages = input.messages.as_array().into_iter().flatten();
        let has_calls = messages.any(|message| message.get("tool_calls").is_some());
        let mut hidden = Vec::new();
        if has_tools && !template.shows_tools() {
            hidden.push(HiddenChatField::Tools);
        }
        if has_calls && !template.shows_calls(has_tools) {
            hidden.push(HiddenChatField::ToolCalls);
        }
        let has_documents = input.documents.as_array().is_some_and(|list| !list.is_empty());
        if has_documents && !template.has_variable("documents") {
            hidden.push(HiddenChatField::Documents);
        }
        let unread = input.kwargs.keys().filter(|name| !template.has_variable(name));
        hidden.extend(unread.map(|name| match name.as_str() {
            REASONING_EFFORT => HiddenChatField::ReasoningEffort,
            name => HiddenChatField::TemplateVariable(name.to_owned()),
        }));
        hidden
    }

    /// Renders one conversation to a prompt.
    ///
    /// Errors: the model has no template for the conversation; the template renders no messages of a role,
    /// fails, raises an exception, or exceeds a limit.
    pub fn render(&self, input: ChatInput) -> Result<RenderedChat, TextError> {
        let template = self.select(input.template.as_deref(), !input.tools.is_null())?;
        let mut context = self.special_tokens.context(input)?;
        let rendered = template.render(&mut context);
        context.finish(rendered)
    }

    /// Selects a template as transformers does: the named one, else `tool_use` for conversations with tools,
    /// else the default template.
    fn select(&self, name: Option<&str>, has_tools: bool) -> Result<&AnalysedTemplate, TextError> {
        let tool_use = || self.templates.get(TOOL_USE_NAME).filter(|_| has_tools);
        let selected = match name {
            Some(name) => self.templates.get(name),
            None => tool_use().or_else(|| self.templates.get(DEFAULT_NAME)),
        };
        selected.ok_or_else(|| {
            let names: Vec<&str> = self.templates.keys().map(String::as_str).collect();
            TextError::NoDefaultTemplate(names.join(", "))
        })
    }
}
