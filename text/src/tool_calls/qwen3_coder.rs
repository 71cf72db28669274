//! Qwen3-Coder: XML-like tool calls. Argument values are converted to the types of the tool's schema.
//!
//! `<tool_call> <function=NAME> <parameter=KEY> value </parameter> … </function> </tool_call>`; the
//! `tool_call` tags and `</parameter>` may be missing. Source: the chat template of
//! Qwen/Qwen3-Coder-30B-A3B-Instruct.

use super::call_emitter::ToolCallEmitter;
use super::call_object::CallParseStatus;
use super::hermes::{CLOSE, OPEN};
use super::json_scanner::is_space;
use super::marker_scanner::MarkerScanner;
use super::schema_types::{ArgumentTypeCache, ArgumentValueParser, quoted};
use super::tool_definition::ToolDefinition;
use super::unparsed_syntax::UnparsedSyntax;
use crate::output_pieces::OutputPieceWriter;
use std::sync::Arc;

const FUNCTION: &str = "<function=";
const FUNCTION_END: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const PARAMETER_END: &str = "</parameter>";
/// Maximum number of bytes of a function name or a parameter key.
const NAME_MAX: usize = 256;

#[derive(Debug, Clone, Default)]
enum Qwen3CoderParserState {
    #[default]
    Text,
    /// After `<tool_call>`: `<function=` must follow.
    Lead,
    Name(String),
    /// After the function name or a parameter: another parameter or the end of the call must follow.
    Between,
    Key(String),
    Value(ArgumentValueParser),
}

/// Parser of tool calls in Qwen3-Coder's syntax.
#[derive(Debug, Clone)]
pub(super) struct Qwen3CoderToolParser {
    schemas: ArgumentTypeCache,
    scanner: MarkerScanner,
    state: Qwen3CoderParserState,
    /// Index of the tool being called; `None` = no tool has the name in the call.
    tool: Option<usize>,
    /// Whether a parameter of the call has been emitted.
    has_parameters: bool,
    /// Whether `</function>` has been read, but no `</tool_call>`.
    closing: bool,
    unparsed: UnparsedSyntax,
}

impl Qwen3CoderToolParser {
    pub(super) fn new(tools: Arc<[ToolDefinition]>) -> Self {
        let (scanner, state) = (MarkerScanner::default(), Qwen3CoderParserState::Text);
        let (schemas, tool, unparsed) =
            (ArgumentTypeCache::new(tools), None, UnparsedSyntax::default());
        let (has_parameters, closing) = (false, false);
        Self { schemas, scanner, state, tool, has_parameters, closing, unparsed }
    }

    pub(super) fn push(
        &mut self,
        c: char,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) {
        if matches!(self.state, Qwen3CoderParserState::Text) {
            return self.text(c, emitter, out);
        }
        let step = match self.syntax(c, emitter, out) {
            false => CallParseStatus::Invalid,
            true if matches!(self.state, Qwen3CoderParserState::Text) => CallParseStatus::Done,
            true => CallParseStatus::Continues,
        };
        if !self.unparsed.apply_step(c, step, emitter) {
            self.reject_call(emitter, out);
            self.text(c, emitter, out);
        }
    }

    pub(super) fn finish(
        &mut self,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) {
        if matches!(self.state, Qwen3CoderParserState::Text) {
            self.scanner.finish(|c| emitter.content(c, out));
        } else {
            self.reject_call(emitter, out);
        }
    }

    fn text(&mut self, c: char, emitter: &mut ToolCallEmitter, out: &mut OutputPieceWriter<'_>) {
        let closing = &mut self.closing;
        let found = self.scanner.push(c, &[OPEN, FUNCTION, CLOSE], |c| {
            *closing &= c.is_whitespace();
            emitter.content(c, out);
        });
        match found {
            Some(0) => self.start(OPEN, Qwen3CoderParserState::Lead, emitter, out),
            Some(1) => {
                self.start(FUNCTION, Qwen3CoderParserState::Name(String::new()), emitter, out);
            }
            Some(_) if std::mem::take(&mut self.closing) => {}
            Some(_) => CLOSE.chars().for_each(|c| emitter.content(c, out)),
            None => {}
        }
    }

    fn start(
        &mut self,
        marker: &str,
        state: Qwen3CoderParserState,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) {
        (self.state, self.closing) = (state, false);
        self.unparsed.open(marker, emitter, out);
    }

    fn reject_call(&mut self, emitter: &mut ToolCallEmitter, out: &mut OutputPieceWriter<'_>) {
        self.unparsed.reject_call(emitter, out);
        (self.scanner, self.state) = (MarkerScanner::default(), Qwen3CoderParserState::Text);
    }

    /// Parses a character inside a call; returns false if it is invalid there.
    fn syntax(
        &mut self,
        c: char,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) -> bool {
        match &mut self.state {
            Qwen3CoderParserState::Text => false,
            Qwen3CoderParserState::Lead => {
                let mut is_valid = true;
                let found = self.scanner.push(c, &[FUNCTION], |c| is_valid &= is_space(c));
                if found.is_some() {
                    self.state = Qwen3CoderParserState::Name(String::new());
                }
                is_valid && self.unparsed.len() <= NAME_MAX
            }
            Qwen3CoderParserState::Name(name) if c == '>' => {
                let name = name.trim();
                if name.is_empty() {
                    return false;
                }
                self.tool = self.schemas.tool(name);
                self.has_parameters = false;
                emitter.begin(name, self.unparsed.from, out);
                emitter.arguments("{", out);
                self.state = Qwen3CoderParserState::Between;
                true
            }
            Qwen3CoderParserState::Key(key) if c == '>' => {
                let key = std::mem::take(key);
                self.value(key.trim(), emitter, out);
                true
            }
            Qwen3CoderParserState::Name(name) | Qwen3CoderParserState::Key(name) => {
                name.push(c);
                name.len() <= NAME_MAX && c != '<' && c != '\n'
            }
            Qwen3CoderParserState::Between => self.between(c, emitter, out),
            Qwen3CoderParserState::Value(_) => self.in_value(c, emitter, out),
        }
    }

    fn between(
        &mut self,
        c: char,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) -> bool {
        let mut is_valid = true;
        let found = self.scanner.push(c, &[PARAMETER, FUNCTION_END], |c| is_valid &= is_space(c));
        match found {
            Some(0) => self.state = Qwen3CoderParserState::Key(String::new()),
            Some(_) => self.end(emitter, out),
            None => {}
        }
        is_valid
    }

    /// Begins a parameter: emits its key as JSON and prepares the parser of its value.
    fn value(&mut self, key: &str, emitter: &mut ToolCallEmitter, out: &mut OutputPieceWriter<'_>) {
        let comma = if std::mem::replace(&mut self.has_parameters, true) { ", " } else { "" };
        emitter.arguments(comma, out);
        emitter.arguments(&quoted(key), out);
        emitter.arguments(": ", out);
        self.state = Qwen3CoderParserState::Value(ArgumentValueParser::new(
            self.schemas.types(self.tool, key),
        ));
    }

    fn in_value(
        &mut self,
        c: char,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) -> bool {
        const END_MARKERS: [&str; 4] = [PARAMETER_END, PARAMETER, FUNCTION_END, CLOSE];
        let Qwen3CoderParserState::Value(value) = &mut self.state else { return false };
        let mut is_valid = true;
        let found = self
            .scanner
            .push(c, &END_MARKERS, |c| is_valid &= value.push(c, |s| emitter.arguments(s, out)));
        let Some(found) = found else { return is_valid };
        value.finish(|s| emitter.arguments(s, out));
        match found {
            0 => self.state = Qwen3CoderParserState::Between,
            1 => self.state = Qwen3CoderParserState::Key(String::new()),
            2 => self.end(emitter, out),
            _ => {
                self.end(emitter, out);
                self.closing = false;
            }
        }
        true
    }

    fn end(&mut self, emitter: &mut ToolCallEmitter, out: &mut OutputPieceWriter<'_>) {
        emitter.arguments("}", out);
        emitter.end(out);
        (self.state, self.closing) = (Qwen3CoderParserState::Text, true);
    }
}
