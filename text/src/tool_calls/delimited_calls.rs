//! Tool calls `call:NAME{key:value,…}` between two markers; strings are enclosed in delimiters.

use super::ToolCallParserOptions;
use super::call_emitter::ToolCallEmitter;
use super::call_grammar::{CallGrammarError, CallGrammarWriter, CallWrapperText, arguments_rule};
use super::call_object::CallParseStatus;
use super::delimited_grammar;
use super::delimited_object::{DelimitedObjectParser, DelimitedScanStatus};
use super::free_grammar::{CallOpening, ToolCallStarts};
use super::json_scanner::is_space;
use super::marked_text::ContentMarkerScanner;
use super::syntax_kind::{ANY_ARGUMENTS, CallParser, SyntaxKind};
use super::tagged_calls::NAME_MAX;
use super::tool_definition::ToolDefinition;
use crate::output_pieces::OutputPieceWriter;

/// Text before the function name.
const LABEL: &str = "call:";

/// Markers of the call syntax of one model family.
#[derive(Debug)]
pub(crate) struct DelimitedCallSyntax {
    pub open: &'static str,
    pub close: &'static str,
    /// Text around strings.
    pub delimiter: &'static str,
}

impl SyntaxKind for DelimitedCallSyntax {
    fn parser(&'static self, _options: ToolCallParserOptions<'_>) -> Option<Box<dyn CallParser>> {
        Some(Box::new(DelimitedToolParser::new(self)))
    }

    fn special_markers(&self) -> Vec<&'static str> {
        vec![self.open, self.close, self.delimiter]
    }

    fn opening_marker(&self) -> Option<&'static str> {
        Some(self.open)
    }

    fn has_json_arguments(&self) -> bool {
        false
    }

    fn call_text(&self, name: &str, _writer: &CallGrammarWriter<'_>) -> CallWrapperText {
        CallWrapperText::new(&format!("{}{LABEL}{name}", self.open), self.close)
    }

    fn add_arguments(
        &'static self,
        index: usize,
        tool: &ToolDefinition,
        writer: &mut CallGrammarWriter<'_>,
    ) -> Result<(), CallGrammarError> {
        let arguments = delimited_grammar::delimited_arguments(self, index, tool, writer)?;
        writer.rule(&arguments_rule(index), &arguments);
        Ok(())
    }

    fn add_any_arguments(&'static self, writer: &mut CallGrammarWriter<'_>) {
        let arguments = delimited_grammar::any_object(self, writer);
        writer.rule(ANY_ARGUMENTS, &arguments);
    }

    fn starts(
        &self,
        _tools: &[&ToolDefinition],
        _writer: &CallGrammarWriter<'_>,
    ) -> Option<ToolCallStarts> {
        Some(ToolCallStarts::marked(vec![CallOpening::single(self.open)]))
    }
}

#[derive(Debug, Clone, Default)]
enum DelimitedParserState {
    #[default]
    Text,
    /// After the opening marker: `label`, the rest of the text `call:`, must follow.
    Lead {
        label: &'static str,
    },
    Name(String),
    Object(Box<DelimitedObjectParser>),
}

/// Parser of tool calls in the delimited syntax.
#[derive(Debug, Clone)]
pub(super) struct DelimitedToolParser {
    syntax: &'static DelimitedCallSyntax,
    text: ContentMarkerScanner,
    state: DelimitedParserState,
}

impl DelimitedToolParser {
    pub(super) fn new(syntax: &'static DelimitedCallSyntax) -> Self {
        Self { syntax, text: ContentMarkerScanner::default(), state: DelimitedParserState::Text }
    }
}

impl CallParser for DelimitedToolParser {
    fn push(&mut self, c: char, emitter: &mut ToolCallEmitter, out: &mut OutputPieceWriter<'_>) {
        let step = match &mut self.state {
            DelimitedParserState::Text => return self.text(c, emitter, out),
            DelimitedParserState::Lead { label } => match label.strip_prefix(c) {
                Some("") => {
                    self.state = DelimitedParserState::Name(String::new());
                    CallParseStatus::Continues
                }
                Some(rest) => {
                    *label = rest;
                    CallParseStatus::Continues
                }
                None if is_space(c) && *label == LABEL => CallParseStatus::Continues,
                None => CallParseStatus::Invalid,
            },
            DelimitedParserState::Name(_) => self.name(c, emitter, out),
            DelimitedParserState::Object(object) => {
                match object.push(c, &mut |part| emitter.arguments(part, out)) {
                    DelimitedScanStatus::Continues => CallParseStatus::Continues,
                    DelimitedScanStatus::Invalid => CallParseStatus::Invalid,
                    DelimitedScanStatus::Done => {
                        emitter.end(out);
                        (self.state, self.text.closing) = (DelimitedParserState::Text, true);
                        CallParseStatus::Done
                    }
                }
            }
        };
        if !self.text.apply_step(c, step, emitter, out) {
            self.state = DelimitedParserState::Text;
            self.text(c, emitter, out);
        }
    }

    fn finish(&mut self, emitter: &mut ToolCallEmitter, out: &mut OutputPieceWriter<'_>) {
        if matches!(self.state, DelimitedParserState::Text) {
            self.text.finish(emitter, out);
        } else {
            self.text.reject_call(out.bytes_read, emitter, out);
        }
    }

    fn boxed_clone(&self) -> Box<dyn CallParser> {
        Box::new(self.clone())
    }
}

impl DelimitedToolParser {
    fn text(&mut self, c: char, emitter: &mut ToolCallEmitter, out: &mut OutputPieceWriter<'_>) {
        let DelimitedCallSyntax { open, close, .. } = *self.syntax;
        match self.text.push(c, &[open, close], emitter, out) {
            Some(0) => {
                self.state = DelimitedParserState::Lead { label: LABEL };
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
        let DelimitedParserState::Name(name) = &mut self.state else {
            return CallParseStatus::Invalid;
        };
        if c == '{' && !name.is_empty() {
            emitter.begin(name, self.text.unparsed.from, out);
            let delimiter = self.syntax.delimiter;
            let object =
                DelimitedObjectParser::new(delimiter, &mut |part| emitter.arguments(part, out));
            self.state = DelimitedParserState::Object(Box::new(object));
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
