//! The syntax in front of a call's arguments as it was read: content, should the call turn out to be none.

use super::call_emitter::ToolCallEmitter;
use super::call_object::CallStep;
use crate::output_pieces::PieceSink;

/// Bytes of syntax in front of a call's arguments at most; more of it is content.
const RAW_MAX: usize = 128 << 10;

/// Syntax read since a mark, as long as no call has begun.
#[derive(Debug, Clone, Default)]
pub(super) struct UnparsedSyntax {
    text: String,
    /// Byte of the output at which it begins.
    pub(super) from: usize,
}

impl UnparsedSyntax {
    /// A mark has just been read: what follows may be a call. Syntax in front of the mark belongs to it.
    pub(super) fn open(&mut self, mark: &str, to: &mut ToolCallEmitter, out: &mut PieceSink<'_>) {
        if self.is_full() {
            self.release(to, out);
        }
        self.from = out.bytes_read - mark.len() - self.text.len();
        self.text.push_str(mark);
    }

    /// Takes what `step` made of the next character; false if it is none of the call's.
    pub(super) fn apply_step(&mut self, c: char, step: CallStep, to: &ToolCallEmitter) -> bool {
        match step {
            CallStep::Continues if !to.is_open() && self.is_full() => return false,
            CallStep::Continues if !to.is_open() => self.text.push(c),
            CallStep::Continues | CallStep::Done => self.text.clear(),
            CallStep::Invalid => return false,
        }
        true
    }

    /// More of it, outside of any call.
    pub(super) fn push(&mut self, c: char) {
        self.text.push(c);
    }

    pub(super) fn len(&self) -> usize {
        self.text.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.text.is_empty()
    }

    /// Whether more syntax than this is content.
    pub(super) fn is_full(&self) -> bool {
        self.text.len() >= RAW_MAX
    }

    /// It is content after all.
    pub(super) fn release(&mut self, to: &mut ToolCallEmitter, out: &mut PieceSink<'_>) {
        self.text.drain(..).for_each(|c| to.content(c, out));
    }

    /// The call is none: it breaks off if it has begun, else what was read of it is content.
    pub(super) fn reject_call(&mut self, to: &mut ToolCallEmitter, out: &mut PieceSink<'_>) {
        to.break_call(out.bytes_read, out);
        self.release(to, out);
    }
}
