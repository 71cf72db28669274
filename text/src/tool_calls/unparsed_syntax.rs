//! Syntax before a call's arguments, kept as read: it becomes content if the call turns out to be invalid.

use super::call_emitter::ToolCallEmitter;
use super::call_object::CallStep;
use crate::output_pieces::PieceSink;

/// Maximum bytes of syntax before a call's arguments; longer syntax is content.
const UNPARSED_MAX: usize = 128 << 10;

/// Syntax read since a marker, until a call has begun.
#[derive(Debug, Clone, Default)]
pub(super) struct UnparsedSyntax {
    text: String,
    /// Byte offset in the output at which the syntax begins.
    pub(super) from: usize,
}

impl UnparsedSyntax {
    /// Records a marker: a call may follow. Syntax before the marker belongs to the same call.
    pub(super) fn open(
        &mut self,
        marker: &str,
        emitter: &mut ToolCallEmitter,
        out: &mut PieceSink<'_>,
    ) {
        if self.is_full() {
            self.release(emitter, out);
        }
        self.from = out.bytes_read - marker.len() - self.text.len();
        self.text.push_str(marker);
    }

    /// Applies the result `step` of the next character; returns false if the character is not part of a call.
    pub(super) fn apply_step(
        &mut self,
        c: char,
        step: CallStep,
        emitter: &ToolCallEmitter,
    ) -> bool {
        match step {
            CallStep::Continues if !emitter.is_open() && self.is_full() => return false,
            CallStep::Continues if !emitter.is_open() => self.text.push(c),
            CallStep::Continues | CallStep::Done => self.text.clear(),
            CallStep::Invalid => return false,
        }
        true
    }

    /// Appends syntax outside of any call.
    pub(super) fn push(&mut self, c: char) {
        self.text.push(c);
    }

    pub(super) fn len(&self) -> usize {
        self.text.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.text.is_empty()
    }

    /// Whether the limit is reached; further syntax is content.
    pub(super) fn is_full(&self) -> bool {
        self.text.len() >= UNPARSED_MAX
    }

    /// Emits the syntax as content.
    pub(super) fn release(&mut self, emitter: &mut ToolCallEmitter, out: &mut PieceSink<'_>) {
        self.text.drain(..).for_each(|c| emitter.content(c, out));
    }

    /// Rejects the call: it is broken off if it has begun, else the text read so far is content.
    pub(super) fn reject_call(&mut self, emitter: &mut ToolCallEmitter, out: &mut PieceSink<'_>) {
        emitter.break_call(out.bytes_read, out);
        self.release(emitter, out);
    }
}
