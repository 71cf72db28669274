//! Template variables of a conversation, and post-processing of the rendered text: special tokens typed by a
//! user stay text, and a message to be continued stays open.

use super::super::error::TextError;
use super::super::special_token_guard::{SpecialTokenGuard, remove_sentinels, unused_characters};
use super::super::tokenizer::Tokenizer;
use super::{ChatInput, RenderedChat};
use serde_json::{Map, Value};
use std::fmt::Write as _;

/// Special tokens of a tokenizer: template variables such as `bos_token`, and the guard for request strings.
#[derive(Debug)]
pub(super) struct SpecialTokens {
    guard: SpecialTokenGuard,
    named: Vec<(String, String)>,
}

/// Variables of one rendering.
pub(super) struct TemplateContext {
    /// Variables by name.
    pub(super) variables: Map<String, Value>,
    /// Whether tools are defined.
    pub(super) has_tools: bool,
    /// Character inserted before characters that must not become part of a special token.
    sentinel: char,
    /// Character inserted at the end of the message to be continued.
    continued: Option<char>,
}

impl SpecialTokens {
    /// Reads the special tokens of a tokenizer.
    ///
    /// Errors: the search automaton over the special tokens would be too large.
    pub(super) fn new(tokenizer: &Tokenizer) -> Result<Self, String> {
        let guard = SpecialTokenGuard::new(tokenizer.special_token_strings())?;
        Ok(Self { guard, named: tokenizer.special_tokens().to_vec() })
    }

    /// Builds the variables of a conversation, with sentinels where a user's text contains (part of) a
    /// special token.
    ///
    /// Errors: there is no message to continue, or no unused character for a sentinel.
    pub(super) fn context(&self, mut input: ChatInput) -> Result<TemplateContext, TextError> {
        let kwargs = Value::Object(std::mem::take(&mut input.kwargs));
        let values = [&input.messages, &input.tools, &input.documents, &kwargs];
        let [sentinel, end] = unused_characters(&values)
            .ok_or_else(|| TextError::Template("no unused character for a sentinel".to_owned()))?;
        if input.continue_final_message {
            let text = last_text(&mut input.messages).ok_or(TextError::NothingToContinue)?;
            // The space after the end character shows whether the template trims its messages.
            let _infallible = write!(text, "{end} ");
        }
        let mut variables = Map::new();
        for (role, token) in &self.named {
            variables.insert(role.clone(), Value::String(token.clone()));
        }
        let mut values = [input.messages, input.tools, input.documents, kwargs];
        for value in &mut values {
            self.guard.insert_sentinels(value, sentinel);
        }
        let [messages, tools, documents, kwargs] = values;
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
    /// Converts the template's output to the prompt.
    ///
    /// Errors: the message to be continued is not in it.
    pub(super) fn finish(&self, mut text: String) -> Result<RenderedChat, TextError> {
        if let Some(end) = self.continued {
            cut_at(&mut text, end)?;
        }
        Ok(remove_sentinels(text, self.sentinel))
    }
}

/// Returns the text to continue: the last message's content, or its last text part.
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

/// Cuts the text at the end of the continued message. A template that trims its messages has removed the
/// space after the end character; then the message's own trailing whitespace is removed too.
fn cut_at(text: &mut String, end: char) -> Result<(), TextError> {
    let at = text.rfind(end).ok_or(TextError::NothingToContinue)?;
    let spaced = text[at + end.len_utf8()..].starts_with(' ');
    text.truncate(at);
    if !spaced {
        text.truncate(text.trim_end().len());
    }
    Ok(())
}
