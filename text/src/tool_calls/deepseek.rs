//! DeepSeek: tool calls between special tokens. V3 and R1 write a type, a function name and JSON in a code
//! fence; V3.1 writes a function name and JSON.
//!
//! Source: the chat templates of deepseek-ai/DeepSeek-V3-0324 and DeepSeek-V3.1.

use super::call_emitter::ToolCallEmitter;
use super::call_object::{CallArgumentsParser, CallParseStatus};
use super::json_scanner::is_space;
use super::marker_scanner::MarkerScanner;
use super::unparsed_syntax::UnparsedSyntax;
use crate::output_pieces::OutputPieceWriter;

pub(super) const CALLS_BEGIN: &str = "<｜tool▁calls▁begin｜>";
pub(super) const CALLS_END: &str = "<｜tool▁calls▁end｜>";
pub(super) const CALL_BEGIN: &str = "<｜tool▁call▁begin｜>";
pub(super) const CALL_END: &str = "<｜tool▁call▁end｜>";
pub(super) const SEPARATOR: &str = "<｜tool▁sep｜>";
const FENCE: &str = "```json";
/// Maximum number of bytes between the opening marker of a call and its arguments.
const HEAD_MAX: usize = 512;

#[derive(Debug, Clone, Default)]
enum DeepSeekParserState {
    #[default]
    Text,
    /// Type of the call (V3) or function name (V3.1), up to `SEPARATOR`.
    Head(String),
    /// V3: function name, up to the code fence.
    Name(String),
    Arguments(CallArgumentsParser),
}

/// Parser of tool calls in DeepSeek's syntax.
#[derive(Debug, Clone)]
pub(super) struct DeepSeekToolParser {
    /// V3: the call starts with a type, and its arguments are in a code fence.
    fenced: bool,
    scanner: MarkerScanner,
    state: DeepSeekParserState,
    /// Whether the position is between `CALLS_BEGIN` and `CALLS_END`.
    inside: bool,
    /// Whether the arguments of a call are complete, but its code fence or its `CALL_END` has not been read.
    closing: bool,
    unparsed: UnparsedSyntax,
}

impl DeepSeekToolParser {
    pub(super) fn new(fenced: bool) -> Self {
        let (scanner, state, unparsed) =
            (MarkerScanner::default(), DeepSeekParserState::Text, UnparsedSyntax::default());
        Self { fenced, scanner, state, inside: false, closing: false, unparsed }
    }

    pub(super) fn push(
        &mut self,
        c: char,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) {
        let step = match &mut self.state {
            DeepSeekParserState::Text => return self.text(c, emitter, out),
            DeepSeekParserState::Head(_) => self.head(c, emitter, out),
            DeepSeekParserState::Name(_) => self.name(c, emitter, out),
            DeepSeekParserState::Arguments(arguments) => match arguments.push(c, emitter, out) {
                CallParseStatus::Done => {
                    (self.state, self.closing) = (DeepSeekParserState::Text, true);
                    CallParseStatus::Done
                }
                step => step,
            },
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
        match self.state {
            DeepSeekParserState::Text => self.scanner.finish(|c| emitter.content(c, out)),
            _ => self.reject_call(emitter, out),
        }
        // `CALLS_BEGIN` without a call is content.
        self.unparsed.release(emitter, out);
    }

    fn text(&mut self, c: char, emitter: &mut ToolCallEmitter, out: &mut OutputPieceWriter<'_>) {
        const MARKERS: [&str; 4] = [CALL_BEGIN, CALLS_BEGIN, CALLS_END, CALL_END];
        let (unparsed, closing) = (&mut self.unparsed, &mut self.closing);
        let found = self.scanner.push(c, &MARKERS, |c| {
            if *closing && (is_space(c) || c == '`') {
                return;
            }
            *closing = false;
            if is_space(c) && !unparsed.is_empty() && !unparsed.is_full() {
                return unparsed.push(c);
            }
            unparsed.release(emitter, out);
            emitter.content(c, out);
        });
        let Some(found) = found else { return };
        let closing = std::mem::take(&mut self.closing);
        match found {
            0 => {
                self.state = DeepSeekParserState::Head(String::new());
                self.unparsed.open(CALL_BEGIN, emitter, out);
            }
            1 => {
                self.inside = true;
                self.unparsed.open(CALLS_BEGIN, emitter, out);
            }
            2 if std::mem::take(&mut self.inside) && self.unparsed.is_empty() => {}
            3 if closing => {}
            marker => {
                self.unparsed.release(emitter, out);
                MARKERS[marker].chars().for_each(|c| emitter.content(c, out));
            }
        }
    }

    fn reject_call(&mut self, emitter: &mut ToolCallEmitter, out: &mut OutputPieceWriter<'_>) {
        self.unparsed.reject_call(emitter, out);
        (self.scanner, self.state) = (MarkerScanner::default(), DeepSeekParserState::Text);
    }

    fn head(
        &mut self,
        c: char,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) -> CallParseStatus {
        let DeepSeekParserState::Head(head) = &mut self.state else {
            return CallParseStatus::Invalid;
        };
        if self.scanner.push(c, &[SEPARATOR], |c| head.push(c)).is_none() {
            return if head.len() > HEAD_MAX {
                CallParseStatus::Invalid
            } else {
                CallParseStatus::Continues
            };
        }
        let name = std::mem::take(head);
        if self.fenced {
            self.state = DeepSeekParserState::Name(String::new());
            return CallParseStatus::Continues;
        }
        self.begin(&name, emitter, out)
    }

    fn name(
        &mut self,
        c: char,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) -> CallParseStatus {
        let DeepSeekParserState::Name(name) = &mut self.state else {
            return CallParseStatus::Invalid;
        };
        if self.scanner.push(c, &[FENCE], |c| name.push(c)).is_none() {
            return if name.len() > HEAD_MAX {
                CallParseStatus::Invalid
            } else {
                CallParseStatus::Continues
            };
        }
        let name = std::mem::take(name);
        self.begin(&name, emitter, out)
    }

    fn begin(
        &mut self,
        name: &str,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) -> CallParseStatus {
        let name = name.trim();
        if name.is_empty() || name.contains('\n') {
            return CallParseStatus::Invalid;
        }
        emitter.begin(name, self.unparsed.from, out);
        self.state = DeepSeekParserState::Arguments(CallArgumentsParser::default());
        CallParseStatus::Continues
    }
}
