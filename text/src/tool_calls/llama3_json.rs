//! The whole output is one JSON object, or several JSON objects separated by semicolons, optionally after
//! `<|python_tag|>`. The syntax has no opening marker, so an object is parsed as a call only if it names a tool of the
//! request.

use super::ToolCallParserOptions;
use super::call_emitter::ToolCallEmitter;
use super::call_grammar::{CallGrammarWriter, CallWrapperText};
use super::call_object::{AllowedFunctionNames, CallObjectParser, CallParseStatus, allowed_names};
use super::free_grammar::{OBJECT_START, ToolCallStarts};
use super::json_scanner::is_space;
use super::marker_scanner::MarkerScanner;
use super::syntax_kind::{CallParser, SyntaxKind};
use super::tool_definition::ToolDefinition;
use super::unparsed_syntax::UnparsedCallText;
use crate::output_pieces::OutputPieceWriter;

const TAG: &str = "<|python_tag|>";

/// JSON objects without markers.
#[derive(Debug)]
pub(crate) struct Llama3JsonSyntax;

impl SyntaxKind for Llama3JsonSyntax {
    fn parser(&'static self, options: ToolCallParserOptions<'_>) -> Option<Box<dyn CallParser>> {
        Some(Box::new(LlamaToolParser::new(Some(allowed_names(options.tools)))))
    }

    fn special_markers(&self) -> Vec<&'static str> {
        vec![TAG]
    }

    /// The syntax has no closing marker, so the parser could not separate several calls from the text that follows.
    fn allows_several(&self) -> bool {
        false
    }

    fn call_text(&self, name: &str, _writer: &CallGrammarWriter<'_>) -> CallWrapperText {
        CallWrapperText::json_object(name, "parameters")
    }

    fn starts(
        &self,
        _tools: &[&ToolDefinition],
        writer: &CallGrammarWriter<'_>,
    ) -> Option<ToolCallStarts> {
        let delimiters = self.delimiters(writer);
        Some(ToolCallStarts::at_start(OBJECT_START.to_owned(), &[TAG], delimiters))
    }
}

#[derive(Debug, Clone)]
enum LlamaParserState {
    /// So far, the output consists of whitespace and optionally `<|python_tag|>`.
    Start {
        tagged: bool,
    },
    Call(Box<CallObjectParser>),
    /// After a call: a semicolon and another call may follow, or content.
    Between,
    Text,
}

/// Parser of tool calls that are JSON objects without markers.
#[derive(Debug, Clone)]
pub(super) struct LlamaToolParser {
    names: AllowedFunctionNames,
    state: LlamaParserState,
    scanner: MarkerScanner,
    unparsed: UnparsedCallText,
}

impl LlamaToolParser {
    pub(super) fn new(names: AllowedFunctionNames) -> Self {
        let state = LlamaParserState::Start { tagged: false };
        Self {
            names,
            state,
            scanner: MarkerScanner::default(),
            unparsed: UnparsedCallText::default(),
        }
    }
}

impl CallParser for LlamaToolParser {
    fn push(&mut self, c: char, emitter: &mut ToolCallEmitter, out: &mut OutputPieceWriter<'_>) {
        match &mut self.state {
            LlamaParserState::Text => emitter.content(c, out),
            LlamaParserState::Call(call) => {
                let step = call.push(c, emitter, out);
                if step == CallParseStatus::Done {
                    self.state = LlamaParserState::Between;
                }
                if !self.unparsed.apply_step(c, step, emitter) {
                    self.reject_call(Some(c), emitter, out);
                }
            }
            LlamaParserState::Start { .. } | LlamaParserState::Between
                if c == '{' && self.scanner.is_empty() =>
            {
                self.open_call(c, emitter, out);
            }
            LlamaParserState::Start { tagged: false } => self.start(c, emitter, out),
            LlamaParserState::Between if c == ';' => self.hold_back(c, emitter, out),
            LlamaParserState::Start { tagged: true } | LlamaParserState::Between if is_space(c) => {
                self.hold_back(c, emitter, out);
            }
            LlamaParserState::Start { tagged: true } | LlamaParserState::Between => {
                self.reject_call(Some(c), emitter, out);
            }
        }
    }

    fn finish(&mut self, emitter: &mut ToolCallEmitter, out: &mut OutputPieceWriter<'_>) {
        let unparsed = &mut self.unparsed;
        self.scanner.finish(|c| unparsed.push(c));
        if !matches!(self.state, LlamaParserState::Between) {
            self.reject_call(None, emitter, out);
        }
    }

    fn boxed_clone(&self) -> Box<dyn CallParser> {
        Box::new(self.clone())
    }
}

impl LlamaToolParser {
    fn open_call(
        &mut self,
        c: char,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) {
        self.unparsed.open("{", emitter, out);
        let mut call = Box::new(CallObjectParser::new(self.names.clone(), self.unparsed.from));
        call.push(c, emitter, out);
        self.state = LlamaParserState::Call(call);
    }

    /// Holds back a character before or between calls, because the character may turn out to be content.
    fn hold_back(
        &mut self,
        c: char,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) {
        self.unparsed.push(c);
        if self.unparsed.is_full() {
            self.reject_call(None, emitter, out);
        }
    }

    fn start(&mut self, c: char, emitter: &mut ToolCallEmitter, out: &mut OutputPieceWriter<'_>) {
        let (unparsed, mut text) = (&mut self.unparsed, false);
        let found = self.scanner.push(c, &[TAG], |c| {
            text |= !is_space(c);
            unparsed.push(c);
        });
        if found.is_some() {
            TAG.chars().for_each(|c| unparsed.push(c));
            self.state = LlamaParserState::Start { tagged: true };
        } else if text || unparsed.is_full() {
            self.reject_call(None, emitter, out);
        }
    }

    /// Rejects the current call: the text held back and the rest of the output become content.
    fn reject_call(
        &mut self,
        c: Option<char>,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) {
        let unparsed = &mut self.unparsed;
        self.scanner.finish(|c| unparsed.push(c));
        let to = c.map_or(out.bytes_read, |c| out.start_of(c));
        unparsed.reject_call(to, emitter, out);
        if let Some(c) = c {
            emitter.content(c, out);
        }
        self.state = LlamaParserState::Text;
    }
}
