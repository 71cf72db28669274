//! Gemma: `call:NAME{key:value,…}` between two markers; strings are enclosed in delimiters.
//!
//! Sources: the chat templates of google/functiongemma-270m-it and google/gemma-4-E4B-it.

use super::call_emitter::ToolCallEmitter;
use super::call_object::CallParseStatus;
use super::delimited_object::{DelimitedObjectParser, DelimitedScanStatus};
use super::json_scanner::is_space;
use super::marked_text::MarkedText;
use super::tagged_calls::NAME_MAX;
use crate::output_pieces::OutputPieceWriter;

/// Text before the function name.
pub(super) const LABEL: &str = "call:";

/// Markers of one model family.
#[derive(Debug)]
pub(super) struct DelimitedSyntax {
    pub open: &'static str,
    pub close: &'static str,
    /// Text around strings.
    pub delimiter: &'static str,
}

pub(super) static FUNCTION_GEMMA: DelimitedSyntax = DelimitedSyntax {
    open: "<start_function_call>",
    close: "<end_function_call>",
    delimiter: "<escape>",
};

pub(super) static GEMMA4: DelimitedSyntax =
    DelimitedSyntax { open: "<|tool_call>", close: "<tool_call|>", delimiter: "<|\"|>" };

#[derive(Debug, Clone, Default)]
enum DelimitedCallState {
    #[default]
    Text,
    /// After the opening marker: the rest of the label must follow.
    Lead {
        label: &'static str,
    },
    Name(String),
    Object(Box<DelimitedObjectParser>),
}

/// Parser of tool calls in Gemma's syntax.
#[derive(Debug, Clone)]
pub(super) struct DelimitedToolParser {
    syntax: &'static DelimitedSyntax,
    text: MarkedText,
    state: DelimitedCallState,
}

impl DelimitedToolParser {
    pub(super) fn new(syntax: &'static DelimitedSyntax) -> Self {
        Self { syntax, text: MarkedText::default(), state: DelimitedCallState::Text }
    }

    pub(super) fn push(
        &mut self,
        c: char,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) {
        let step = match &mut self.state {
            DelimitedCallState::Text => return self.text(c, emitter, out),
            DelimitedCallState::Lead { label } => match label.strip_prefix(c) {
                Some("") => {
                    self.state = DelimitedCallState::Name(String::new());
                    CallParseStatus::Continues
                }
                Some(rest) => {
                    *label = rest;
                    CallParseStatus::Continues
                }
                None if is_space(c) && *label == LABEL => CallParseStatus::Continues,
                None => CallParseStatus::Invalid,
            },
            DelimitedCallState::Name(_) => self.name(c, emitter, out),
            DelimitedCallState::Object(object) => {
                match object.push(c, &mut |part| emitter.arguments(part, out)) {
                    DelimitedScanStatus::Continues => CallParseStatus::Continues,
                    DelimitedScanStatus::Invalid => CallParseStatus::Invalid,
                    DelimitedScanStatus::Done => {
                        emitter.end(out);
                        (self.state, self.text.closing) = (DelimitedCallState::Text, true);
                        CallParseStatus::Done
                    }
                }
            }
        };
        if !self.text.apply_step(c, step, emitter, out) {
            self.state = DelimitedCallState::Text;
            self.text(c, emitter, out);
        }
    }

    pub(super) fn finish(
        &mut self,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) {
        if matches!(self.state, DelimitedCallState::Text) {
            self.text.finish(emitter, out);
        } else {
            self.text.reject_call(out.bytes_read, emitter, out);
        }
    }

    fn text(&mut self, c: char, emitter: &mut ToolCallEmitter, out: &mut OutputPieceWriter<'_>) {
        let DelimitedSyntax { open, close, .. } = *self.syntax;
        match self.text.push(c, &[open, close], emitter, out) {
            Some(0) => {
                self.state = DelimitedCallState::Lead { label: LABEL };
                self.text.open(open, emitter, out);
            }
            Some(_) => self.text.close(close, emitter, out),
            None => {}
        }
    }

    /// Parses a character of the function name.
    fn name(
        &mut self,
        c: char,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) -> CallParseStatus {
        let DelimitedCallState::Name(name) = &mut self.state else {
            return CallParseStatus::Invalid;
        };
        if c == '{' && !name.is_empty() {
            emitter.begin(name, self.text.unparsed.from, out);
            let delimiter = self.syntax.delimiter;
            let object =
                DelimitedObjectParser::new(delimiter, &mut |part| emitter.arguments(part, out));
            self.state = DelimitedCallState::Object(Box::new(object));
            return CallParseStatus::Continues;
        }
        name.push(c);
        let is_name = c.is_alphanumeric() || "_-.:/".contains(c);
        if is_name && name.len() <= NAME_MAX {
            CallParseStatus::Continues
        } else {
            CallParseStatus::Invalid
        }
    }
}
