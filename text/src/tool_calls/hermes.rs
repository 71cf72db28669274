//! Hermes, Qwen2.5, Qwen3: `<tool_call>` JSON object `</tool_call>`, any number of times.
//!
//! Source: the chat templates of Qwen/Qwen2.5-7B-Instruct and Qwen/Qwen3-8B.

use super::call_emitter::ToolCallEmitter;
use super::call_object::{CallObjectParser, CallParseStatus};
use super::marked_text::MarkedText;
use crate::output_pieces::OutputPieceWriter;

pub(super) const OPEN: &str = "<tool_call>";
pub(super) const CLOSE: &str = "</tool_call>";

/// Parser of tool calls in Hermes syntax.
#[derive(Debug, Clone, Default)]
pub(super) struct HermesToolParser {
    text: MarkedText,
    call: Option<CallObjectParser>,
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
            (self.call, self.text.closing) = (None, true);
        }
        if !self.text.apply_step(c, step, emitter, out) {
            self.call = None;
            self.text(c, emitter, out);
        }
    }

    pub(super) fn finish(
        &mut self,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) {
        self.text.finish(emitter, out);
        self.call = None;
        self.text.reject_call(out.bytes_read, emitter, out);
    }

    fn text(&mut self, c: char, emitter: &mut ToolCallEmitter, out: &mut OutputPieceWriter<'_>) {
        match self.text.push(c, &[OPEN, CLOSE], emitter, out) {
            Some(0) => {
                self.text.open(OPEN, emitter, out);
                self.call = Some(CallObjectParser::new(None, self.text.unparsed.from));
            }
            Some(_) => self.text.close(CLOSE, emitter, out),
            None => {}
        }
    }
}
