//! Hermes, Qwen2.5, Qwen3: `<tool_call>` JSON object `</tool_call>`, any number of times.
//!
//! Source: the chat templates of Qwen/Qwen2.5-7B-Instruct and Qwen/Qwen3-8B.

use super::call_emitter::ToolCallEmitter;
use super::call_object::{CallObjectParser, CallParseStatus};
use super::marker_scanner::MarkerScanner;
use super::unparsed_syntax::UnparsedSyntax;
use crate::output_pieces::OutputPieceWriter;

pub(super) const OPEN: &str = "<tool_call>";
pub(super) const CLOSE: &str = "</tool_call>";

/// Parser of tool calls in Hermes syntax.
#[derive(Debug, Clone, Default)]
pub(super) struct HermesToolParser {
    scanner: MarkerScanner,
    /// Whether a call object is complete, but its `</tool_call>` has not been read.
    closing: bool,
    call: Option<CallObjectParser>,
    unparsed: UnparsedSyntax,
}

impl HermesToolParser {
    pub(super) fn push(
        &mut self,
        c: char,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) {
        let Some(call) = &mut self.call else { return self.text(c, emitter, out) };
        let step = call.push(c, emitter, out);
        if step == CallParseStatus::Done {
            (self.call, self.closing) = (None, true);
        }
        if !self.unparsed.apply_step(c, step, emitter) {
            self.reject_call(out.start_of(c), emitter, out);
            self.text(c, emitter, out);
        }
    }

    pub(super) fn finish(
        &mut self,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) {
        self.scanner.finish(|c| emitter.content(c, out));
        self.reject_call(out.bytes_read, emitter, out);
    }

    /// Rejects the current call as malformed: its text before byte `to` of the output becomes content.
    fn reject_call(
        &mut self,
        to: usize,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) {
        self.call = None;
        self.unparsed.reject_call(to, emitter, out);
    }

    fn text(&mut self, c: char, emitter: &mut ToolCallEmitter, out: &mut OutputPieceWriter<'_>) {
        let found = self.scanner.push(c, &[OPEN, CLOSE], |c| emitter.content(c, out));
        match found {
            Some(0) => {
                self.unparsed.open(OPEN, emitter, out);
                self.call = Some(CallObjectParser::new(None, self.unparsed.from));
                self.closing = false;
            }
            Some(_) if std::mem::take(&mut self.closing) && emitter.is_after_call() => {
                emitter.drop_space();
            }
            Some(_) => CLOSE.chars().for_each(|c| emitter.content(c, out)),
            None => {}
        }
    }
}
