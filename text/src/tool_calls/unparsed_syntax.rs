//! Text of a tool call before its arguments. The text is held back unchanged, because it becomes content if
//! the call is malformed.

use super::call_emitter::ToolCallEmitter;
use super::call_object::CallParseStatus;
use crate::output_pieces::OutputPieceWriter;

/// Maximum number of bytes of a call that are held back until the call begins; a longer text is emitted as
/// content.
const UNPARSED_MAX: usize = 128 << 10;

/// Text read since the opening marker of a call, until the call begins (`ToolCallEmitter::begin`).
#[derive(Debug, Clone, Default)]
pub(super) struct UnparsedCallText {
    text: String,
    /// Byte offset in the output at which the held-back text begins.
    pub(super) from: usize,
}

impl UnparsedCallText {
    /// Starts to hold back text at an opening marker (such as `<tool_call>`). If no valid tool call follows,
    /// the text is emitted as content. If text is already held back, the marker is appended to it.
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

    /// Updates the held-back text after the character `c` of a call; `step` is the parse status after `c`.
    /// Until the call begins to be emitted, `c` is appended to the text; then the text is dropped. Returns
    /// false if `c` is not part of a call.
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

    /// Holds back a character that is outside of any call (between markers).
    pub(super) fn push(&mut self, c: char) {
        self.text.push(c);
    }

    pub(super) fn len(&self) -> usize {
        self.text.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.text.is_empty()
    }

    /// Whether the held-back text has reached `UNPARSED_MAX` bytes, so that further text is emitted as
    /// content.
    pub(super) fn is_full(&self) -> bool {
        self.text.len() >= UNPARSED_MAX
    }

    /// Emits the held-back text as content.
    pub(super) fn release(
        &mut self,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) {
        self.text.drain(..).for_each(|c| emitter.content(c, out));
    }

    /// Rejects the call, whose text ends before byte `to` of the output. A call of which a part was emitted
    /// is reported as malformed; otherwise the text of the call becomes content.
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
