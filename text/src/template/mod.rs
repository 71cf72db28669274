//! Chat template of a model folder or of a request: renders messages to the text of a prompt.
//!
//! Rendering follows `apply_chat_template` of transformers 5 (Jinja2 with `trim_blocks` and `lstrip_blocks`,
//! `tojson` as Python writes JSON, `raise_exception`, `strftime_now`, loop controls, `{% generation %}`
//! ignored) and is limited in instructions and output. The templates of a model are compiled once at startup.
//! The template of a request is rendered by a child process with limits on memory and CPU time:
//! `request_template.rs`.

mod child;
mod context;
mod engine;
mod inline_system;
mod message;
mod request_template;
mod source;

pub use child::serve as serve_templates;
pub use request_template::RequestTemplateRenderer;

use super::error::{TextError, TextLoadError};
use super::tokenizer::Tokenizer;
use context::SpecialTokens;
use engine::TemplateEngine;
use serde_json::{Map, Value};
use source::TemplateSource;
use std::path::Path;

/// Maximum size of a template file in bytes.
pub const TEMPLATE_BYTES_MAX: usize = 1 << 20;

/// Input of a chat template. Special tokens in its strings, except in `template`, remain plain text.
#[derive(Debug, Clone, Default)]
pub struct ChatInput {
    /// Chat template sent in the request; `None` = the template of the model.
    pub template: Option<String>,
    /// Messages: a JSON array of objects as in the request.
    pub messages: Value,
    /// Tool definitions as in the request, or null.
    pub tools: Value,
    /// Documents (for retrieval-augmented generation) as in the request, or null.
    pub documents: Value,
    /// Whether the prompt ends with the opening of an assistant turn.
    pub add_generation_prompt: bool,
    /// Whether the end of the last message is omitted, so that the model continues this message.
    pub continue_final_message: bool,
    /// `chat_template_kwargs` of the request, completed by the defaults of the server.
    pub kwargs: Map<String, Value>,
}

/// Text of a prompt, and the positions at which user text contains (part of) a special token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RenderedChat {
    /// Text of the prompt.
    pub text: String,
    /// Ascending byte positions in `text` that no special token may cover.
    pub(super) protected_positions: Vec<usize>,
}

/// Compiled chat templates of one model.
#[derive(Debug)]
pub struct ChatTemplate {
    engine: TemplateEngine,
    special_tokens: SpecialTokens,
}

impl ChatTemplate {
    /// Compiles the template of the model folder `dir`, or `chosen` (value of `--chat-template`: the path of
    /// a file, or the template itself). `Ok(None)` if there is no template: chat requests are then rejected.
    ///
    /// The template is read from `chat_template.jinja`, `chat_template.json` or `tokenizer_config.json`, in
    /// this order of precedence; a list of named templates is supported. Rendering stops at
    /// `output_bytes_max` bytes.
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
        let mut engine = TemplateEngine::new(output_bytes_max);
        for TemplateSource { name, text, path } in sources {
            let invalid = |reason: String| TextLoadError::Invalid { path: path.clone(), reason };
            if text.len() > TEMPLATE_BYTES_MAX {
                return Err(invalid(format!("chat template exceeds {TEMPLATE_BYTES_MAX} bytes")));
            }
            let added = engine.add(name, &text);
            added.map_err(|reason| invalid(format!("chat template: {reason}")))?;
        }
        let special = SpecialTokens::new(tokenizer).map_err(|reason| TextLoadError::Invalid {
            path: dir.join("tokenizer.json"),
            reason,
        })?;
        Ok(Some(Self { engine, special_tokens: special }))
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
        let engine = TemplateEngine::of_text(text, output_bytes_max)?;
        let special = SpecialTokens::new(tokenizer).map_err(TextError::Template)?;
        Ok(Self { engine, special_tokens: special })
    }

    /// Returns the source of the template for conversations without tools.
    pub fn source(&self) -> Option<String> {
        self.engine.source()
    }

    /// Whether the source of one of the model's templates contains `text`.
    pub fn mentions(&self, text: &str) -> bool {
        self.engine.mentions(text)
    }

    /// Renders one conversation to a prompt.
    pub fn render(&self, input: ChatInput) -> Result<RenderedChat, TextError> {
        let context = self.special_tokens.context(input)?;
        context.finish(self.engine.render(context.has_tools, &context.variables)?)
    }
}
