//! Splits an output in the harmony format into reasoning, content and tool calls, character by character.
//!
//! Markers and headers are dropped. Text without a header is content, and so is the whole text of a malformed
//! call or header. Messages of one kind are joined by a line break.

mod malformed;

use super::header::{HarmonyHeader, HarmonyMessageKind, HeaderStatus};
use super::{HarmonyMarker, MARKERS};
use crate::output_pieces::OutputPieceWriter;
use crate::reasoning::ReasoningStart;
use crate::tool_calls::{
    CallArgumentsParser, CallParseStatus, MarkerScanner, ToolCallEmitter, ToolCallParserOptions,
};
use grammar::ReasoningState;
use std::sync::Arc;

/// Maximum number of bytes of a call before its arguments: the header, and whitespace.
const CALL_HEAD_MAX: usize = 1_024;

/// Part of a message that is being read.
#[derive(Debug, Clone)]
enum HarmonyState {
    /// Header of a message, or the text between two messages. The boxed header keeps the state small.
    Header(Box<HarmonyHeader>),
    Reasoning,
    Content,
    /// Tool call before its arguments.
    CallHead(HarmonyCallHead),
    Arguments(CallArgumentsParser),
}

/// Tool call whose header is complete and whose arguments have not begun.
#[derive(Debug, Clone)]
struct HarmonyCallHead {
    /// Name of the function.
    name: String,
    /// Byte offset in the output at which the header begins.
    from: usize,
    /// Text since the beginning of the header. It is content if no arguments follow.
    text: String,
}

/// Parser of one output in the harmony format.
#[derive(Debug, Clone)]
pub(crate) struct HarmonyParser {
    state: HarmonyState,
    scanner: MarkerScanner,
    emitter: ToolCallEmitter,
    /// Names of the functions that the model may call; `None` = calls are not parsed.
    functions: Option<Arc<[String]>>,
    /// Section that text continues if it does not turn out to be a header: the section that was interrupted
    /// by a marker without the end of its message.
    interrupted: Option<HarmonyMessageKind>,
    has_reasoning: bool,
    has_content: bool,
    /// Whether a line break precedes the next character of the section.
    breaks_line: bool,
    /// Whether the answer or a tool call has begun, after which no reasoning is expected.
    has_answer: bool,
}

impl HarmonyParser {
    /// Creates a parser of a new output that begins in the state `start`: inside the reasoning, inside the
    /// answer (`After`), or inside a header (`AtMarker`).
    pub(crate) fn new(start: ReasoningStart, calls: Option<ToolCallParserOptions<'_>>) -> Self {
        let names = |options: ToolCallParserOptions<'_>| {
            options.tools.iter().map(|tool| tool.name.clone()).collect()
        };
        Self {
            state: match start {
                ReasoningStart::AtMarker => header_from(0),
                ReasoningStart::Inside => HarmonyState::Reasoning,
                ReasoningStart::After => HarmonyState::Content,
            },
            scanner: MarkerScanner::default(),
            emitter: ToolCallEmitter::new(calls.map_or(0, |options| options.max_calls)),
            functions: calls.map(names),
            interrupted: None,
            has_reasoning: false,
            has_content: false,
            breaks_line: false,
            has_answer: start == ReasoningStart::After,
        }
    }

    /// Returns the number of calls that were emitted and are complete.
    pub(crate) fn complete_calls(&self) -> u32 {
        self.emitter.complete()
    }

    /// Whether the output parsed so far ends inside the text of a reasoning message.
    pub(crate) fn is_reasoning(&self) -> bool {
        matches!(self.state, HarmonyState::Reasoning)
    }

    /// Returns the position of the output parsed so far relative to its reasoning. Between two messages the
    /// reasoning may begin again, until the answer or a tool call begins.
    pub(crate) fn reasoning_state(&self, at_character_boundary: bool) -> ReasoningState {
        match self.state {
            _ if self.has_answer => ReasoningState::After,
            HarmonyState::Reasoning => ReasoningState::Inside { at_character_boundary },
            _ => ReasoningState::Before,
        }
    }

    /// Parses the next character of the output.
    pub(crate) fn push(&mut self, c: char, out: &mut OutputPieceWriter<'_>) {
        if self.argument(c, out) {
            return;
        }
        let mut scanner = self.scanner;
        let found = scanner.push(c, &MARKERS, |c| self.text(c, out));
        self.scanner = scanner;
        if let Some(index) = found {
            self.marker(HarmonyMarker::ALL[index], out);
        }
    }

    /// Ends the output: emits the text held back. An incomplete header after a marker is dropped. A call that
    /// ends before its arguments is complete is broken.
    pub(crate) fn finish(&mut self, out: &mut OutputPieceWriter<'_>) {
        let mut scanner = self.scanner;
        if !matches!(&self.state, HarmonyState::Header(header) if !header.is_lead()) {
            scanner.finish(|c| self.text(c, out));
        }
        if matches!(&self.state, HarmonyState::Header(header) if header.is_unmarked_text()) {
            self.reject_header(out);
        }
        if let HarmonyState::CallHead(head) = &self.state {
            self.emitter.begin(&head.name, head.from, out);
        }
        self.emitter.finish(out);
    }

    /// Adds a character to the arguments of the open call. Returns false if there is none, or if the
    /// arguments are malformed; the character then belongs to the content.
    fn argument(&mut self, c: char, out: &mut OutputPieceWriter<'_>) -> bool {
        let HarmonyState::Arguments(arguments) = &mut self.state else { return false };
        match arguments.push(c, &mut self.emitter, out) {
            CallParseStatus::Continues => {}
            CallParseStatus::Done => self.state = header_from(out.bytes_read),
            CallParseStatus::Invalid => {
                self.emitter.break_call(out.start_of(c), out);
                self.enter(&HarmonyMessageKind::Answer);
                self.breaks_line = false;
                return false;
            }
        }
        true
    }

    /// Processes a character that does not belong to a marker.
    fn text(&mut self, c: char, out: &mut OutputPieceWriter<'_>) {
        match &mut self.state {
            HarmonyState::Header(header) => {
                if header.push(c) == HeaderStatus::Malformed {
                    self.reject_header(out);
                }
            }
            HarmonyState::Reasoning => {
                if std::mem::take(&mut self.breaks_line) {
                    out.reasoning('\n');
                }
                self.has_reasoning = true;
                out.reasoning(c);
            }
            HarmonyState::CallHead(_) => self.call_head(c, out),
            HarmonyState::Content | HarmonyState::Arguments(_) => {
                if !self.argument(c, out) {
                    self.content(c, out);
                }
            }
        }
    }

    fn content(&mut self, c: char, out: &mut OutputPieceWriter<'_>) {
        if std::mem::take(&mut self.breaks_line) {
            out.content('\n');
        }
        self.has_content = true;
        out.content(c);
    }

    /// Processes a character after the header of a call: its arguments begin with `{`.
    fn call_head(&mut self, c: char, out: &mut OutputPieceWriter<'_>) {
        let HarmonyState::CallHead(head) = &mut self.state else { return };
        if c == '{' {
            self.emitter.begin(&head.name, head.from, out);
            self.state = HarmonyState::Arguments(CallArgumentsParser::default());
            self.argument(c, out);
        } else {
            head.text.push(c);
            if !c.is_ascii_whitespace() || head.text.len() > CALL_HEAD_MAX {
                self.reject_call(out);
            }
        }
    }

    /// Processes a marker.
    fn marker(&mut self, marker: HarmonyMarker, out: &mut OutputPieceWriter<'_>) {
        match &mut self.state {
            HarmonyState::Header(_) => self.header_marker(marker, out),
            _ => match marker {
                HarmonyMarker::Constrain | HarmonyMarker::Message => self.literal(marker, out),
                HarmonyMarker::Start | HarmonyMarker::Channel => self.begin_header(marker, out),
                HarmonyMarker::End | HarmonyMarker::Call | HarmonyMarker::Return => {
                    self.end_message(out);
                }
            },
        }
    }

    /// Processes a marker inside a header, or between two messages.
    fn header_marker(&mut self, marker: HarmonyMarker, out: &mut OutputPieceWriter<'_>) {
        let HarmonyState::Header(header) = &mut self.state else { return };
        match marker {
            HarmonyMarker::Start if !header.is_blank() => {
                self.end_message(out);
                self.begin_header(marker, out);
            }
            HarmonyMarker::End | HarmonyMarker::Call | HarmonyMarker::Return => {
                self.end_message(out);
            }
            _ => {
                if header.is_blank() {
                    **header = HarmonyHeader::new(out.bytes_read - marker.text().len());
                }
                if header.marker(marker) == HeaderStatus::Malformed {
                    self.reject_header(out);
                    self.marker(marker, out);
                } else if marker == HarmonyMarker::Message {
                    self.open_message();
                }
            }
        }
    }

    /// Adds a marker that has no meaning where it occurs to the text.
    fn literal(&mut self, marker: HarmonyMarker, out: &mut OutputPieceWriter<'_>) {
        marker.text().chars().for_each(|c| self.text(c, out));
    }

    /// Begins the header of a message whose predecessor has not ended.
    fn begin_header(&mut self, marker: HarmonyMarker, out: &mut OutputPieceWriter<'_>) {
        if matches!(self.state, HarmonyState::CallHead(_)) {
            self.reject_call(out);
        }
        self.interrupted = match self.state {
            HarmonyState::Reasoning => Some(HarmonyMessageKind::Reasoning),
            HarmonyState::Content => Some(HarmonyMessageKind::Answer),
            _ => None,
        };
        let mut header = HarmonyHeader::new(out.bytes_read - marker.text().len());
        header.marker(marker);
        self.state = HarmonyState::Header(Box::new(header));
    }

    /// Ends the message at an end marker.
    fn end_message(&mut self, out: &mut OutputPieceWriter<'_>) {
        if matches!(&self.state, HarmonyState::Header(header) if header.has_text()) {
            self.reject_header(out);
        }
        if matches!(self.state, HarmonyState::CallHead(_)) {
            self.reject_call(out);
        }
        self.interrupted = None;
        self.state = header_from(out.bytes_read);
    }

    /// Begins the text of the message whose header is complete.
    fn open_message(&mut self) {
        let HarmonyState::Header(header) = &mut self.state else { return };
        self.interrupted = None;
        match header.message_kind(self.functions.as_deref()) {
            HarmonyMessageKind::Call(name) => {
                let (from, text) = (header.from, std::mem::take(&mut header.text));
                self.state = HarmonyState::CallHead(HarmonyCallHead { name, from, text });
                self.has_answer = true;
            }
            section => self.enter(&section),
        }
    }

    /// Begins the text of a message that is reasoning or content.
    fn enter(&mut self, section: &HarmonyMessageKind) {
        if *section == HarmonyMessageKind::Reasoning {
            self.state = HarmonyState::Reasoning;
            self.breaks_line = self.has_reasoning;
        } else {
            self.state = HarmonyState::Content;
            self.breaks_line = self.has_content;
        }
        self.has_answer |=
            !matches!(section, HarmonyMessageKind::Reasoning | HarmonyMessageKind::Preamble);
    }
}

/// Returns the state between two messages; the next message begins at or after byte `from` of the output.
fn header_from(from: usize) -> HarmonyState {
    HarmonyState::Header(Box::new(HarmonyHeader::new(from)))
}
