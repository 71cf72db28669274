//! Where the machines of all families write: content, and calls with their numbers.
//!
//! Whitespace between content and a call, and between calls, belongs to neither and is dropped.

use crate::output_pieces::PieceSink;

/// Whitespace held back at most; a longer run is content.
const SPACE_MAX: usize = 256;

/// The calls of one output so far.
#[derive(Debug, Clone)]
pub(super) struct ToolCallEmitter {
    /// Whitespace that is content unless a call follows.
    space: String,
    /// Byte of the output at which it begins.
    space_from: usize,
    /// Number of the next call.
    next: u32,
    /// Calls that are shown; later ones are parsed and dropped.
    shown_max: u32,
    open: bool,
    /// Calls shown and complete.
    complete: u32,
}

impl ToolCallEmitter {
    pub(super) fn new(shown_max: u32) -> Self {
        let (space, space_from) = (String::new(), 0);
        Self { space, space_from, next: 0, shown_max, open: false, complete: 0 }
    }

    /// Calls shown and complete.
    pub(super) fn complete(&self) -> u32 {
        self.complete
    }

    /// Whether a call has begun and not ended.
    #[inline]
    pub(super) fn is_open(&self) -> bool {
        self.open
    }

    /// One character of content.
    #[inline]
    pub(super) fn content(&mut self, c: char, out: &mut PieceSink<'_>) {
        if c.is_whitespace() && self.space.len() < SPACE_MAX {
            if self.space.is_empty() {
                self.space_from = out.bytes_read - c.len_utf8();
            }
            self.space.push(c);
            return;
        }
        self.flush(out);
        out.content(c);
    }

    /// A call begins; its syntax did at byte `from`.
    pub(super) fn begin(&mut self, name: &str, from: usize, out: &mut PieceSink<'_>) {
        // What stands directly in front belongs to the call, should that turn out to be content.
        let adjoins = self.space_from + self.space.len() == from;
        let from = if adjoins { self.space_from } else { from };
        self.space.clear();
        self.open = true;
        self.next += 1;
        if self.is_shown() {
            out.begin_call(self.next - 1, name, from);
        }
    }

    /// The next part of the arguments of the call that is open.
    pub(super) fn arguments(&mut self, part: &str, out: &mut PieceSink<'_>) {
        if self.is_shown() {
            out.arguments(self.next - 1, part);
        }
    }

    /// The next character of them.
    #[inline]
    pub(super) fn argument(&mut self, c: char, out: &mut PieceSink<'_>) {
        if self.is_shown() {
            out.argument(self.next - 1, c);
        }
    }

    /// The open call is complete.
    pub(super) fn end(&mut self, out: &mut PieceSink<'_>) {
        self.open = false;
        if self.is_shown() {
            self.complete += 1;
            out.end_call(self.next - 1);
        }
    }

    /// The open call, if there is one, is none after all; its syntax ends before byte `to`.
    pub(super) fn break_call(&mut self, to: usize, out: &mut PieceSink<'_>) {
        if std::mem::take(&mut self.open) && self.is_shown() {
            out.broken_call(self.next - 1, to);
        }
    }

    /// The output has ended. Whitespace behind a call is none of the answer.
    pub(super) fn finish(&mut self, out: &mut PieceSink<'_>) {
        self.break_call(out.bytes_read, out);
        if self.complete == 0 {
            self.flush(out);
        }
    }

    fn is_shown(&self) -> bool {
        self.next <= self.shown_max
    }

    #[inline]
    fn flush(&mut self, out: &mut PieceSink<'_>) {
        if !self.space.is_empty() {
            self.space.drain(..).for_each(|c| out.content(c));
        }
    }
}
