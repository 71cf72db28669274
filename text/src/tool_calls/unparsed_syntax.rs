//! Text of a tool call before its arguments. It is kept unchanged, because it becomes content if the call is
//! malformed.

use super::call_emitter::ToolCallEmitter;
use super::call_object::CallParseStatus;
use crate::output_pieces::OutputPieceWriter;

/// Maximum number of bytes of a call's syntax that are kept until the call begins; longer text is emitted as
/// content.
const UNPARSED_MAX: usize = 128 << 10;

/// Text read since the opening marker of a call, until the call begins (`ToolCallEmitter::begin`).
#[derive(Debug, Clone, Default)]
pub(super) struct UnparsedCallText {
    text: String,
    /// Byte offset in the output at which the kept text begins.
    pub(super) from: usize,
}

impl UnparsedCallText {
    /// Starts to keep text at an opening marker (such as `<tool_call>`): if no valid tool call follows, the
    /// kept text is emitted as content. Text that is kept already belongs to the same attempt.
    pub(super) fn open(
        &mut self,
        marker: &str,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) {
        if self.is_full() {
            self.release(emitter, out);
        }
        self.from = out.bytes_read - marker.len() - self.text.len();
        self.text.push_str(marker);
    }

    /// Keeps or drops the text after the next character, whose parse state is `step`; returns false if the
    /// character is not part of a call.
    pub(super) fn apply_step(
        &mut self,
        c: char,
        step: CallParseStatus,
        emitter: &ToolCallEmitter,
    ) -> bool {
        match step {
            CallParseStatus::Continues if !emitter.is_open() && self.is_full() => return false,
            CallParseStatus::Continues if !emitter.is_open() => self.text.push(c),
            CallParseStatus::Continues | CallParseStatus::Done => self.text.clear(),
            CallParseStatus::Invalid => return false,
        }
        true
    }

    /// Keeps a character that is outside of any call (between markers).
    pub(super) fn push(&mut self, c: char) {
        self.text.push(c);
    }

    pub(super) fn len(&self) -> usize {
        self.text.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.text.is_empty()
    }

    /// Whether the kept text has reached `UNPARSED_MAX` bytes, so that further text is emitted as content.
    pub(super) fn is_full(&self) -> bool {
        self.text.len() >= UNPARSED_MAX
    }

    /// Emits the kept text as content.
    pub(super) fn release(
        &mut self,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) {
        self.text.drain(..).for_each(|c| emitter.content(c, out));
    }

    /// Rejects the call, whose syntax ends before byte `to` of the output: if it has begun, it is reported as
    /// malformed, else its text becomes content.
    pub(super) fn reject_call(
        &mut self,
        to: usize,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) {
        emitter.break_call(to, out);
        self.release(emitter, out);
    }
}
