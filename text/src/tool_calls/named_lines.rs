//! Tool calls without a marker of their own: a line that is the name of a function, then the JSON of the arguments
//! from the next line on. A call begins at the start of a line or after the marker that separates the calls of an output.
//! Only names of the request's tools are names of functions.

use super::ToolCallParserOptions;
use super::call_emitter::ToolCallEmitter;
use super::call_grammar::{CallDelimiters, CallGrammarWriter, CallWrapperText};
use super::call_object::{CallArgumentsParser, CallParseStatus};
use super::free_grammar::{ToolCallStarts, name_pattern};
use super::json_scanner::is_space;
use super::marker_scanner::MarkerScanner;
use super::syntax_kind::{CallParser, SyntaxKind};
use super::tool_definition::ToolDefinition;
use super::unparsed_syntax::UnparsedCallText;
use crate::output_pieces::OutputPieceWriter;
use std::sync::Arc;

/// Lines with function names before the arguments, of one model family.
#[derive(Debug)]
pub(crate) struct NamedLineSyntax {
    /// Special token that begins a message of the model, and separates several calls in one output.
    pub separator: &'static str,
}

impl SyntaxKind for NamedLineSyntax {
    fn parser(&'static self, options: ToolCallParserOptions<'_>) -> Option<Box<dyn CallParser>> {
        let names = options.tools.iter().map(|tool| tool.name.clone()).collect();
        Some(Box::new(NamedLineToolParser::new(self.separator, names)))
    }

    fn special_markers(&self) -> Vec<&'static str> {
        vec![self.separator]
    }

    fn delimiters(&self, _writer: &CallGrammarWriter<'_>) -> CallDelimiters {
        CallDelimiters::new("", self.separator, "")
    }

    fn call_text(&self, name: &str, _writer: &CallGrammarWriter<'_>) -> CallWrapperText {
        CallWrapperText::new(&format!("{name}\n"), "")
    }

    fn starts(
        &self,
        tools: &[&ToolDefinition],
        writer: &CallGrammarWriter<'_>,
    ) -> Option<ToolCallStarts> {
        let names = name_pattern(tools);
        let start = format!("(?:(?s:.*)\\n\\s*)?(?:{names})[ \\t\\r]*\\n\\s*\\{{");
        Some(ToolCallStarts::at_start(start, &[self.separator], self.delimiters(writer)))
    }
}

#[derive(Debug, Clone)]
enum NamedLineParserState {
    /// At the start of a line, of which the text was read so far: a function name may follow.
    Line(String),
    /// After a line that is the name of a function: the arguments must follow.
    Name(String),
    Arguments(CallArgumentsParser),
    /// Within a line that is not the name of a function.
    Text,
}

/// Parser of tool calls whose functions are named in a line of their own.
#[derive(Debug, Clone)]
pub(super) struct NamedLineToolParser {
    separator: &'static str,
    /// Names of the request's tools in sorted order.
    names: Arc<[String]>,
    state: NamedLineParserState,
    scanner: MarkerScanner,
    unparsed: UnparsedCallText,
}

impl NamedLineToolParser {
    pub(super) fn new(separator: &'static str, mut names: Vec<String>) -> Self {
        names.sort_unstable();
        Self {
            separator,
            names: names.into(),
            state: NamedLineParserState::Line(String::new()),
            scanner: MarkerScanner::default(),
            unparsed: UnparsedCallText::default(),
        }
    }
}

impl CallParser for NamedLineToolParser {
    fn push(&mut self, c: char, emitter: &mut ToolCallEmitter, out: &mut OutputPieceWriter<'_>) {
        match &mut self.state {
            NamedLineParserState::Text => self.text(c, emitter, out),
            NamedLineParserState::Line(_) => self.line(c, emitter, out),
            NamedLineParserState::Name(_) => self.arguments_start(c, emitter, out),
            NamedLineParserState::Arguments(arguments) => {
                let step = arguments.push(c, emitter, out);
                if step == CallParseStatus::Done {
                    self.state = NamedLineParserState::Text;
                }
                if !self.unparsed.apply_step(c, step, emitter) {
                    self.unparsed.reject_call(out.start_of(c), emitter, out);
                    self.text(c, emitter, out);
                }
            }
        }
    }

    fn finish(&mut self, emitter: &mut ToolCallEmitter, out: &mut OutputPieceWriter<'_>) {
        self.unparsed.reject_call(out.bytes_read, emitter, out);
        self.scanner.finish(|c| emitter.content(c, out));
    }

    fn boxed_clone(&self) -> Box<dyn CallParser> {
        Box::new(self.clone())
    }
}

impl NamedLineToolParser {
    /// Processes a character of a line that is not the name of a function.
    fn text(&mut self, c: char, emitter: &mut ToolCallEmitter, out: &mut OutputPieceWriter<'_>) {
        self.state = match self.scanner.push(c, &[self.separator], |c| emitter.content(c, out)) {
            Some(_) => {
                self.unparsed.open(self.separator, emitter, out);
                NamedLineParserState::Line(String::new())
            }
            None if c == '\n' => NamedLineParserState::Line(String::new()),
            None => NamedLineParserState::Text,
        };
    }

    /// Processes a character at the start of a line, which is held back while it may be the name of a function.
    fn line(&mut self, c: char, emitter: &mut ToolCallEmitter, out: &mut OutputPieceWriter<'_>) {
        let NamedLineParserState::Line(text) = &mut self.state else { return };
        if text.is_empty() && is_space(c) {
            return if self.unparsed.is_empty() {
                emitter.content(c, out);
            } else {
                self.hold_back(c, emitter, out);
            };
        }
        let is_name = is_known(&self.names, text.trim_end());
        if c == '\n' && is_name {
            self.state = NamedLineParserState::Name(text.trim_end().to_owned());
            return self.hold_back(c, emitter, out);
        }
        text.push(c);
        let may_continue = is_prefix(&self.names, text) || is_space(c) && c != '\n' && is_name;
        if !may_continue {
            self.unparsed.release(emitter, out);
            return self.text(c, emitter, out);
        }
        if self.unparsed.is_empty() {
            self.unparsed.open(c.encode_utf8(&mut [0; 4]), emitter, out);
        } else {
            self.hold_back(c, emitter, out);
        }
    }

    /// Processes a character between the name of a function and its arguments.
    fn arguments_start(
        &mut self,
        c: char,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) {
        let NamedLineParserState::Name(name) = &self.state else { return };
        if is_space(c) {
            return self.hold_back(c, emitter, out);
        }
        if c != '{' {
            self.unparsed.release(emitter, out);
            self.state = NamedLineParserState::Line(String::new());
            return self.line(c, emitter, out);
        }
        emitter.begin(name, self.unparsed.from, out);
        self.state = NamedLineParserState::Arguments(CallArgumentsParser::default());
        self.push(c, emitter, out);
    }

    /// Holds back a character before the arguments of a call. Text that is too long to be held back is content.
    fn hold_back(
        &mut self,
        c: char,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) {
        self.unparsed.push(c);
        if self.unparsed.is_full() {
            self.unparsed.release(emitter, out);
            self.state = NamedLineParserState::Text;
        }
    }
}

/// Whether one of `names`, which are sorted, is `text`.
fn is_known(names: &[String], text: &str) -> bool {
    names.binary_search_by(|name| name.as_str().cmp(text)).is_ok()
}

/// Whether one of `names`, which are sorted, begins with `text`.
fn is_prefix(names: &[String], text: &str) -> bool {
    let at = names.partition_point(|name| name.as_str() < text);
    names.get(at).is_some_and(|name| name.starts_with(text))
}
