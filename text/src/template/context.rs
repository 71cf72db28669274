//! A conversation as a template reads it, and what becomes of the text: special tokens that a user typed stay text, and a message to be
//! continued stays open.

use super::super::error::TextError;
use super::super::special_token_guard::{SpecialTokenGuard, remove_sentinels, unused_characters};
use super::super::tokenizer::Tokenizer;
use super::{ChatInput, RenderedChat};
use serde_json::{Map, Value};
use std::fmt::Write as _;

/// The special tokens of a tokenizer, as templates name and users spell them.
#[derive(Debug)]
pub(super) struct SpecialTokens {
    guard: SpecialTokenGuard,
    named: Vec<(String, String)>,
}

/// The variables of one rendering.
pub(super) struct TemplateContext {
    /// By name.
    pub(super) variables: Map<String, Value>,
    /// Whether tools are defined.
    pub(super) has_tools: bool,
    /// In front of characters that must not become part of a special token.
    sentinel: char,
    /// The end of the message to be continued.
    continued: Option<char>,
}

impl SpecialTokens {
    /// Those of a tokenizer.
    ///
    /// Errors: they are too many to be searched for.
    pub(super) fn new(tokenizer: &Tokenizer) -> Result<Self, String> {
        let guard = SpecialTokenGuard::new(tokenizer.special_spellings())?;
        Ok(Self { guard, named: tokenizer.special_tokens().to_vec() })
    }

    /// The variables for a conversation, each place where a user spells (part of) a special token marked.
    ///
    /// Errors: there is no message to continue, or no character left for a mark.
    pub(super) fn context(&self, mut input: ChatInput) -> Result<TemplateContext, TextError> {
        let kwargs = Value::Object(std::mem::take(&mut input.kwargs));
        let values = [&input.messages, &input.tools, &input.documents, &kwargs];
        let [sentinel, end] = unused_characters(&values)
            .ok_or_else(|| TextError::Template("no character left for a mark".to_owned()))?;
        if input.continue_final_message {
            let text = last_text(&mut input.messages).ok_or(TextError::NothingToContinue)?;
            // The space after the mark shows whether the template trims its messages.
            let _infallible = write!(text, "{end} ");
        }
        let mut variables = Map::new();
        for (role, token) in &self.named {
            variables.insert(role.clone(), Value::String(token.clone()));
        }
        let mut user = [input.messages, input.tools, input.documents, kwargs];
        for value in &mut user {
            self.guard.insert_sentinels(value, sentinel);
        }
        let [messages, tools, documents, kwargs] = user;
        let has_tools = !tools.is_null();
        variables.insert("messages".to_owned(), messages);
        if has_tools {
            variables.insert("tools".to_owned(), tools);
        }
        if !documents.is_null() {
            variables.insert("documents".to_owned(), documents);
        }
        variables.insert("add_generation_prompt".to_owned(), input.add_generation_prompt.into());
        if let Value::Object(kwargs) = kwargs {
            variables.extend(kwargs);
        }
        let continued = input.continue_final_message.then_some(end);
        Ok(TemplateContext { variables, has_tools, sentinel, continued })
    }
}

impl TemplateContext {
    /// The prompt that a template wrote for this conversation.
    ///
    /// Errors: the message to be continued is not in it.
    pub(super) fn finish(&self, mut text: String) -> Result<RenderedChat, TextError> {
        if let Some(end) = self.continued {
            cut_at(&mut text, end)?;
        }
        Ok(remove_sentinels(text, self.sentinel))
    }
}

/// The text to continue: the last message's content, or its last text part.
fn last_text(messages: &mut Value) -> Option<&mut String> {
    match messages.as_array_mut()?.last_mut()?.get_mut("content")? {
        Value::String(text) => Some(text),
        Value::Array(parts) => {
            let texts = parts.iter_mut().rev().find_map(|part| part.get_mut("text"));
            match texts {
                Some(Value::String(text)) => Some(text),
                _ => None,
            }
        }
        _ => None,
    }
}

/// Ends the text where the continued message ends. A template that trims its messages has
/// removed the space behind the mark; then the message's own trailing space goes too.
fn cut_at(text: &mut String, end: char) -> Result<(), TextError> {
    let at = text.rfind(end).ok_or(TextError::NothingToContinue)?;
    let spaced = text[at + end.len_utf8()..].starts_with(' ');
    text.truncate(at);
    if !spaced {
        text.truncate(text.trim_end().len());
    }
    Ok(())
}
