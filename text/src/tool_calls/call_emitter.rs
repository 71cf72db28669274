//! Emits content and numbered tool calls; the tool call parsers of all model families use it.
//!
//! Whitespace between content and a call, or between two calls, belongs to neither and is dropped.

use crate::output_pieces::OutputPieceWriter;

/// Maximum number of whitespace bytes that are held back before a possible tool call; the rest of a longer
/// run is emitted as content.
const SPACE_MAX: usize = 256;

/// Emits the content and the tool calls of one output.
#[derive(Debug, Clone)]
pub(super) struct ToolCallEmitter {
    /// Whitespace held back: it is emitted as content unless a call follows.
    space: String,
    /// Byte offset in the output at which the whitespace held back begins.
    space_from: usize,
    /// Index of the next tool call in the output.
    next: u32,
    /// Maximum number of calls to emit; further calls are parsed and dropped.
    calls_max: u32,
    open: bool,
    /// Number of calls that were emitted and are complete.
    complete: u32,
}

impl ToolCallEmitter {
    pub(super) fn new(calls_max: u32) -> Self {
        let (space, space_from) = (String::new(), 0);
        Self { space, space_from, next: 0, calls_max, open: false, complete: 0 }
    }

    /// Returns the number of calls that were emitted and are complete.
    pub(super) fn complete(&self) -> u32 {
        self.complete
    }

    /// Whether a call has begun and has not ended.
    #[inline]
    pub(super) fn is_open(&self) -> bool {
        self.open
    }

    /// Adds one character of content.
    #[inline]
    pub(super) fn content(&mut self, c: char, out: &mut OutputPieceWriter<'_>) {
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

    /// Begins a call whose syntax begins at byte `from` of the output.
    pub(super) fn begin(&mut self, name: &str, from: usize, out: &mut OutputPieceWriter<'_>) {
        // Whitespace directly before the call is counted as part of it, so that it is restored if the call
        // turns out to be content.
        let adjoins = self.space_from + self.space.len() == from;
        let from = if adjoins { self.space_from } else { from };
        self.space.clear();
        self.open = true;
        self.next += 1;
        if self.is_within_limit() {
            out.begin_call(self.next - 1, name, from);
        }
    }

    /// Adds the next part of the open call's arguments.
    pub(super) fn arguments(&mut self, part: &str, out: &mut OutputPieceWriter<'_>) {
        if self.is_within_limit() {
            out.arguments(self.next - 1, part);
        }
    }

    /// Adds the next character of the open call's arguments.
    #[inline]
    pub(super) fn argument(&mut self, c: char, out: &mut OutputPieceWriter<'_>) {
        if self.is_within_limit() {
            out.argument(self.next - 1, c);
        }
    }

    /// Completes the open call.
    pub(super) fn end(&mut self, out: &mut OutputPieceWriter<'_>) {
        self.open = false;
        if self.is_within_limit() {
            self.complete += 1;
            out.end_call(self.next - 1);
        }
    }

    /// Ends the open call, if there is one, as malformed; its syntax ends before byte `to` of the output.
    pub(super) fn break_call(&mut self, to: usize, out: &mut OutputPieceWriter<'_>) {
        if std::mem::take(&mut self.open) && self.is_within_limit() {
            out.broken_call(self.next - 1, to);
        }
    }

    /// Ends the output. Whitespace held back after a call is dropped.
    pub(super) fn finish(&mut self, out: &mut OutputPieceWriter<'_>) {
        self.break_call(out.bytes_read, out);
        if self.complete == 0 {
            self.flush(out);
        }
    }

    fn is_within_limit(&self) -> bool {
        self.next <= self.calls_max
    }

    #[inline]
    fn flush(&mut self, out: &mut OutputPieceWriter<'_>) {
        if !self.space.is_empty() {
            self.space.drain(..).for_each(|c| out.content(c));
        }
    }
}
