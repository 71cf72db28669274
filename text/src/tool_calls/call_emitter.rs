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
    /// Index of the next tool call in the output.
    next: u32,
    /// Maximum number of calls to emit; further calls are parsed and dropped.
    calls_max: u32,
    open: bool,
    /// Number of calls that were emitted and are complete.
    complete: u32,
    /// Whether only whitespace has followed the last complete call.
    after_call: bool,
}

impl ToolCallEmitter {
    pub(super) fn new(calls_max: u32) -> Self {
        let (space, next, complete) = (String::new(), 0, 0);
        Self { space, next, calls_max, open: false, complete, after_call: false }
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
            self.space.push(c);
            return;
        }
        self.flush(out);
        self.after_call = false;
        out.content(c);
    }

    /// Whether only whitespace has followed the last complete call, so that a marker that closes this call is
    /// part of its syntax.
    pub(super) fn is_after_call(&self) -> bool {
        self.after_call
    }

    /// Drops the whitespace held back, because a marker that closes the last call follows it.
    pub(super) fn drop_space(&mut self) {
        self.space.clear();
    }

    /// Begins a call whose syntax begins at byte `from` of the output.
    pub(super) fn begin(&mut self, name: &str, from: usize, out: &mut OutputPieceWriter<'_>) {
        // Whitespace before the call is counted as part of it, so that it is restored if the call turns out to
        // be content. It is directly before the call: a marker that closes an earlier call drops it.
        let from = from - self.space.len();
        self.space.clear();
        (self.open, self.after_call) = (true, false);
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
        (self.open, self.after_call) = (false, true);
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
        if !self.after_call {
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
