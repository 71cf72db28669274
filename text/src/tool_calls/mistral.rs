//! `[TOOL_CALLS]` followed by an array of call objects, or (tokenizer versions from v11) `[TOOL_CALLS]name{…}` for each
//! call, with `[CALL_ID]…` and `[ARGS]` in some versions.

use super::ToolCallParserOptions;
use super::call_emitter::ToolCallEmitter;
use super::call_grammar::{CallDelimiters, CallGrammarWriter, CallWrapperText};
use super::call_list::CallListParser;
use super::call_object::{CallArgumentsParser, CallParseStatus};
use super::free_grammar::{CallOpening, ToolCallStarts};
use super::json_scanner::is_space;
use super::marked_text::ContentMarkerScanner;
use super::syntax_kind::{CallParser, SyntaxKind};
use super::tool_definition::{ToolDefinition, is_tool_name_part};
use crate::output_pieces::OutputPieceWriter;

const CALLS: &str = "[TOOL_CALLS]";
const CALL_ID: &str = "[CALL_ID]";
const ARGS: &str = "[ARGS]";
/// Maximum number of bytes between `[TOOL_CALLS]` and the arguments, in the form with a name before the
/// arguments.
const HEAD_MAX: usize = 512;

/// Calls after `[TOOL_CALLS]`.
#[derive(Debug)]
pub(crate) struct MistralSyntax;

impl SyntaxKind for MistralSyntax {
    fn parser(&'static self, _options: ToolCallParserOptions<'_>) -> Option<Box<dyn CallParser>> {
        Some(Box::new(MistralToolParser::default()))
    }

    fn special_markers(&self) -> Vec<&'static str> {
        vec![CALLS, CALL_ID, ARGS]
    }

    fn opening_marker(&self) -> Option<&'static str> {
        Some(CALLS)
    }

    fn delimiters(&self, writer: &CallGrammarWriter<'_>) -> CallDelimiters {
        if writer.has_special(ARGS) {
            CallDelimiters::default()
        } else {
            CallDelimiters::new(&format!("{CALLS}["), ", ", "]")
        }
    }

    fn call_text(&self, name: &str, writer: &CallGrammarWriter<'_>) -> CallWrapperText {
        if writer.has_special(ARGS) {
            CallWrapperText::new(&format!("{CALLS}{name}{ARGS}"), "")
        } else {
            CallWrapperText::json_object(name, "arguments")
        }
    }

    fn starts(
        &self,
        _tools: &[&ToolDefinition],
        writer: &CallGrammarWriter<'_>,
    ) -> Option<ToolCallStarts> {
        let opening = if writer.has_special(ARGS) {
            CallOpening::single(CALLS)
        } else {
            CallOpening::list(CALLS, self.delimiters(writer))
        };
        Some(ToolCallStarts::marked(vec![opening]))
    }
}

#[derive(Debug, Clone, Default)]
enum MistralParserState {
    #[default]
    Text,
    /// After `[TOOL_CALLS]`: an array or a name must follow.
    Lead,
    List(CallListParser),
    Name(String),
    /// Call id after the function name; the id is dropped.
    Id(String),
    Arguments(CallArgumentsParser),
}

/// Parser of tool calls after `[TOOL_CALLS]`.
#[derive(Debug, Clone, Default)]
pub(super) struct MistralToolParser {
    text: ContentMarkerScanner,
    state: MistralParserState,
}

impl CallParser for MistralToolParser {
    fn push(&mut self, c: char, emitter: &mut ToolCallEmitter, out: &mut OutputPieceWriter<'_>) {
        if matches!(self.state, MistralParserState::Text) {
            return self.text(c, emitter, out);
        }
        let step = self.syntax(c, emitter, out);
        if !self.text.apply_step(c, step, emitter, out) {
            self.state = MistralParserState::Text;
            self.text(c, emitter, out);
        }
    }

    fn finish(&mut self, emitter: &mut ToolCallEmitter, out: &mut OutputPieceWriter<'_>) {
        match &self.state {
            MistralParserState::Text => self.text.finish(emitter, out),
            MistralParserState::List(list) if list.is_after_object() => {}
            _ => self.text.reject_call(out.bytes_read, emitter, out),
        }
    }

    fn boxed_clone(&self) -> Box<dyn CallParser> {
        Box::new(self.clone())
    }
}

impl MistralToolParser {
    fn text(&mut self, c: char, emitter: &mut ToolCallEmitter, out: &mut OutputPieceWriter<'_>) {
        if self.text.push(c, &[CALLS], emitter, out).is_some() {
            self.state = MistralParserState::Lead;
            self.text.open(CALLS, emitter, out);
        }
    }

    /// Parses a character after `[TOOL_CALLS]`.
    fn syntax(
        &mut self,
        c: char,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) -> CallParseStatus {
        match &mut self.state {
            MistralParserState::Text => CallParseStatus::Invalid,
            MistralParserState::Lead if is_space(c) => CallParseStatus::Continues,
            MistralParserState::Lead if c == '[' => {
                let mut list = CallListParser::new(None, self.text.unparsed.from);
                list.push(c, emitter, out);
                self.go(MistralParserState::List(list))
            }
            MistralParserState::Lead => {
                self.state = MistralParserState::Name(String::new());
                self.head(c, emitter, out)
            }
            MistralParserState::List(list) => {
                let step = list.push(c, emitter, out);
                if list.is_complete() {
                    self.state = MistralParserState::Text;
                }
                step
            }
            MistralParserState::Arguments(arguments) => {
                let step = arguments.push(c, emitter, out);
                if step == CallParseStatus::Done {
                    self.state = MistralParserState::Text;
                }
                step
            }
            MistralParserState::Name(_) | MistralParserState::Id(_) => self.head(c, emitter, out),
        }
    }

    fn go(&mut self, state: MistralParserState) -> CallParseStatus {
        self.state = state;
        CallParseStatus::Continues
    }

    /// Parses the function name and an optional call id, up to the arguments.
    fn head(
        &mut self,
        c: char,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) -> CallParseStatus {
        let (name, in_name) = match &mut self.state {
            MistralParserState::Name(name) => (name, true),
            MistralParserState::Id(name) => (name, false),
            _ => return CallParseStatus::Invalid,
        };
        if self.text.unparsed.len() > HEAD_MAX {
            return CallParseStatus::Invalid;
        }
        if c == '{' && self.text.scanner.is_empty() && in_name && !name.is_empty() {
            emitter.begin(name, self.text.unparsed.from, out);
            let mut arguments = CallArgumentsParser::default();
            arguments.push(c, emitter, out);
            return self.go(MistralParserState::Arguments(arguments));
        }
        let mut is_valid = true;
        let found = self.text.scanner.push(c, &[CALL_ID, ARGS], |c| {
            is_valid &= is_tool_name_part(c);
            if in_name {
                name.push(c);
            }
        });
        match found {
            _ if !is_valid => CallParseStatus::Invalid,
            None => CallParseStatus::Continues,
            Some(_) if name.is_empty() => CallParseStatus::Invalid,
            Some(0) if in_name => {
                let name = std::mem::take(name);
                self.go(MistralParserState::Id(name))
            }
            Some(0) => CallParseStatus::Invalid,
            Some(_) => {
                emitter.begin(name, self.text.unparsed.from, out);
                self.go(MistralParserState::Arguments(CallArgumentsParser::default()))
            }
        }
    }
}
