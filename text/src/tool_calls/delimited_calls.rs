//! Gemma: `call:NAME{key:value,…}` between two markers; strings are enclosed in delimiters.
//!
//! Sources: the chat templates of google/functiongemma-270m-it and google/gemma-4-E4B-it.

use super::call_emitter::ToolCallEmitter;
use super::call_object::CallParseStatus;
use super::delimited_object::{GemmaObjectParser, GemmaScanStatus};
use super::json_scanner::is_space;
use super::marked_text::ContentMarkerScanner;
use super::tagged_calls::NAME_MAX;
use crate::output_pieces::OutputPieceWriter;

/// Text before the function name.
pub(super) const LABEL: &str = "call:";

/// Markers of the call syntax of one Gemma model family.
#[derive(Debug)]
pub(super) struct GemmaCallSyntax {
    pub open: &'static str,
    pub close: &'static str,
    /// Text around strings.
    pub delimiter: &'static str,
}

pub(super) static FUNCTION_GEMMA: GemmaCallSyntax = GemmaCallSyntax {
    open: "<start_function_call>",
    close: "<end_function_call>",
    delimiter: "<escape>",
};

pub(super) static GEMMA4: GemmaCallSyntax =
    GemmaCallSyntax { open: "<|tool_call>", close: "<tool_call|>", delimiter: "<|\"|>" };

#[derive(Debug, Clone, Default)]
enum GemmaParserState {
    #[default]
    Text,
    /// After the opening marker: `label`, the rest of the text `call:`, must follow.
    Lead {
        label: &'static str,
    },
    Name(String),
    Object(Box<GemmaObjectParser>),
}

/// Parser of tool calls in Gemma's syntax.
#[derive(Debug, Clone)]
pub(super) struct GemmaToolParser {
    syntax: &'static GemmaCallSyntax,
    text: ContentMarkerScanner,
    state: GemmaParserState,
}

impl GemmaToolParser {
    pub(super) fn new(syntax: &'static GemmaCallSyntax) -> Self {
        Self { syntax, text: ContentMarkerScanner::default(), state: GemmaParserState::Text }
    }

    pub(super) fn push(
        &mut self,
        c: char,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) {
        let step = match &mut self.state {
            GemmaParserState::Text => return self.text(c, emitter, out),
            GemmaParserState::Lead { label } => match label.strip_prefix(c) {
                Some("") => {
                    self.state = GemmaParserState::Name(String::new());
                    CallParseStatus::Continues
                }
                Some(rest) => {
                    *label = rest;
                    CallParseStatus::Continues
                }
                None if is_space(c) && *label == LABEL => CallParseStatus::Continues,
                None => CallParseStatus::Invalid,
            },
            GemmaParserState::Name(_) => self.name(c, emitter, out),
            GemmaParserState::Object(object) => {
                match object.push(c, &mut |part| emitter.arguments(part, out)) {
                    GemmaScanStatus::Continues => CallParseStatus::Continues,
                    GemmaScanStatus::Invalid => CallParseStatus::Invalid,
                    GemmaScanStatus::Done => {
                        emitter.end(out);
                        (self.state, self.text.closing) = (GemmaParserState::Text, true);
                        CallParseStatus::Done
                    }
                }
            }
        };
        if !self.text.apply_step(c, step, emitter, out) {
            self.state = GemmaParserState::Text;
            self.text(c, emitter, out);
        }
    }

    pub(super) fn finish(
        &mut self,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) {
        if matches!(self.state, GemmaParserState::Text) {
            self.text.finish(emitter, out);
        } else {
            self.text.reject_call(out.bytes_read, emitter, out);
        }
    }

    fn text(&mut self, c: char, emitter: &mut ToolCallEmitter, out: &mut OutputPieceWriter<'_>) {
        let GemmaCallSyntax { open, close, .. } = *self.syntax;
        match self.text.push(c, &[open, close], emitter, out) {
            Some(0) => {
                self.state = GemmaParserState::Lead { label: LABEL };
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
        let GemmaParserState::Name(name) = &mut self.state else {
            return CallParseStatus::Invalid;
        };
        if c == '{' && !name.is_empty() {
            emitter.begin(name, self.text.unparsed.from, out);
            let delimiter = self.syntax.delimiter;
            let object =
                GemmaObjectParser::new(delimiter, &mut |part| emitter.arguments(part, out));
            self.state = GemmaParserState::Object(Box::new(object));
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
