//! Variables of a chat template for one conversation, and post-processing of the rendered text: special
//! tokens typed by a user remain plain text, and the end-of-turn text of a message to be continued is
//! removed.

use super::super::error::TextError;
use super::super::special_token_guard::{SpecialTokenFinder, remove_sentinels, unused_characters};
use super::super::tokenizer::Tokenizer;
use super::conversation::other_argument_forms;
use super::{ChatInput, RenderedChat};
use serde_json::{Map, Value};
use std::fmt::Write as _;

/// Special tokens of a tokenizer: template variables such as `bos_token`, and the guard that protects user
/// text.
#[derive(Debug)]
pub(super) struct SpecialTokens {
    guard: SpecialTokenFinder,
    named: Vec<(String, String)>,
}

/// Template variables of one conversation, and the data needed to post-process the rendered text.
pub(super) struct TemplateContext {
    /// Variables by name.
    pub(super) variables: Map<String, Value>,
    /// Arguments of the tool calls in `messages`, converted to the other form (JSON text to an object, an
    /// object to JSON text): result of `other_argument_forms`.
    pub(super) other_arguments: Vec<Value>,
    /// Sentinel: character inserted before characters that must not become part of a special token.
    sentinel: char,
    /// Character inserted at the end of the message to be continued, which marks this position in the
    /// rendered text.
    continued: Option<char>,
}

impl SpecialTokens {
    /// Reads the special tokens of a tokenizer.
    ///
    /// Errors: the search automaton over the special tokens would be too large.
    pub(super) fn new(tokenizer: &Tokenizer) -> Result<Self, String> {
        let guard = SpecialTokenFinder::new(tokenizer.special_token_strings())?;
        Ok(Self { guard, named: tokenizer.special_tokens().to_vec() })
    }

    /// Builds the template variables of a conversation, with sentinels where user text contains (part of) a
    /// special token.
    ///
    /// Errors: there is no message to continue, or no unused character for a sentinel.
    pub(super) fn context(&self, mut input: ChatInput) -> Result<TemplateContext, TextError> {
        let kwargs = Value::Object(std::mem::take(&mut input.kwargs));
        let other_arguments = Value::Array(other_argument_forms(&mut input.messages));
        let values = [&input.messages, &input.tools, &input.documents, &kwargs, &other_arguments];
        let [sentinel, end] = unused_characters(&values)
            .ok_or_else(|| TextError::Template("no unused character for a sentinel".to_owned()))?;
        if input.continue_final_message {
            let text = last_text(&mut input.messages).ok_or(TextError::NothingToContinue)?;
            // The space after the end character reveals whether the template trims its messages: if so, the
            // space is missing in the rendered text.
            let _infallible = write!(text, "{end} ");
        }
        let mut variables = self.variables();
        let mut values = [input.messages, input.tools, input.documents, kwargs, other_arguments];
        for value in &mut values {
            self.guard.insert_sentinels(value, sentinel);
        }
        let [messages, tools, documents, kwargs, other_arguments] = values;
        variables.insert("messages".to_owned(), messages);
        // As in transformers, `tools` and `documents` that the request does not give are none, not undefined.
        variables.insert("tools".to_owned(), tools);
        variables.insert("documents".to_owned(), documents);
        variables.insert("add_generation_prompt".to_owned(), input.add_generation_prompt.into());
        if let Value::Object(kwargs) = kwargs {
            variables.extend(kwargs);
        }
        let other_arguments = into_list(other_arguments);
        let continued = input.continue_final_message.then_some(end);
        Ok(TemplateContext { variables, other_arguments, sentinel, continued })
    }

    /// Returns the template variables that contain the special tokens of the tokenizer.
    pub(super) fn variables(&self) -> Map<String, Value> {
        let tokens = self.named.iter();
        tokens.map(|(role, token)| (role.clone(), Value::String(token.clone()))).collect()
    }
}

impl TemplateContext {
    /// Converts the rendered text to the prompt: cuts it at the end of the message to be continued, and
    /// removes the sentinels.
    ///
    /// Errors: the rendering failed, or the rendered text does not contain the message to be continued.
    pub(super) fn finish(
        &self,
        rendered: Result<String, TextError>,
    ) -> Result<RenderedChat, TextError> {
        let is_added = |c: char| c == self.sentinel || Some(c) == self.continued;
        let mut text = rendered.map_err(|error| error.without_characters(is_added))?;
        if let Some(end) = self.continued {
            cut_at(&mut text, end)?;
        }
        Ok(remove_sentinels(text, self.sentinel))
    }
}

fn into_list(value: Value) -> Vec<Value> {
    match value {
        Value::Array(list) => list,
        _ => Vec::new(),
    }
}

/// Returns the text of the message to be continued: the content of the last message, or its last text part.
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

/// Cuts the rendered text at the end character of the message to be continued. If the space after the end
/// character is missing, the template trims its messages; then trailing whitespace of the message is removed
/// too.
fn cut_at(text: &mut String, end: char) -> Result<(), TextError> {
    let at = text.rfind(end).ok_or(TextError::NothingToContinue)?;
    let spaced = text[at + end.len_utf8()..].starts_with(' ');
    text.truncate(at);
    if !spaced {
        text.truncate(text.trim_end().len());
    }
    Ok(())
}
