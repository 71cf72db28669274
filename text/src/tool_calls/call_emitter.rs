//! Emits content and tool calls, with their index in the output, for the tool call parsers of all model
//! families.
//!
//! Whitespace between content and a call, or between two calls, is dropped.

use crate::output_pieces::OutputPieceWriter;

/// Maximum number of whitespace bytes held back before a possible tool call; in a longer run, the excess is
/// emitted as content.
const SPACE_MAX: usize = 256;

/// Emits the content and the tool calls of one output.
#[derive(Debug, Clone)]
pub(crate) struct ToolCallEmitter {
    /// Whitespace held back; it is emitted as content unless a call follows.
    space: String,
    /// Index of the next tool call in the output.
    next: u32,
    /// Maximum number of calls to emit; further calls are parsed and dropped.
    calls_max: u32,
    open: bool,
    /// Number of complete calls that were emitted.
    complete: u32,
    /// Whether only whitespace has followed the last complete call.
    after_call: bool,
}

impl ToolCallEmitter {
    pub(crate) fn new(calls_max: u32) -> Self {
        let (space, next, complete) = (String::new(), 0, 0);
        Self { space, next, calls_max, open: false, complete, after_call: false }
    }

    /// Returns the number of complete calls that were emitted.
    pub(crate) fn complete(&self) -> u32 {
        self.complete
    }

    /// Whether a call has begun and has not ended.
    #[inline]
    pub(crate) fn is_open(&self) -> bool {
        self.open
    }

    /// Adds one character of content.
    #[inline]
    pub(crate) fn content(&mut self, c: char, out: &mut OutputPieceWriter<'_>) {
        if c.is_whitespace() && self.space.len() < SPACE_MAX {
            self.space.push(c);
            return;
        }
        self.flush(out);
        self.after_call = false;
        out.content(c);
    }

    /// Whether only whitespace has followed the last complete call. If so, a closing marker belongs to the
    /// syntax of this call.
    pub(crate) fn is_after_call(&self) -> bool {
        self.after_call
    }

    /// Drops the whitespace held back between the last call and its closing marker.
    pub(crate) fn drop_space(&mut self) {
        self.space.clear();
    }

    /// Begins a call whose syntax begins at byte `from` of the output.
    pub(crate) fn begin(&mut self, name: &str, from: usize, out: &mut OutputPieceWriter<'_>) {
        // The whitespace held back is counted as part of the call, so that it is restored if the call turns
        // out to be content. The whitespace is directly before the call, because a closing marker of an
        // earlier call drops earlier whitespace.
        let from = from - self.space.len();
        self.space.clear();
        (self.open, self.after_call) = (true, false);
        self.next += 1;
        if self.is_within_limit() {
            out.begin_call(self.next - 1, name, from);
        }
    }

    /// Adds the next part of the open call's arguments.
    pub(crate) fn arguments(&mut self, part: &str, out: &mut OutputPieceWriter<'_>) {
        if self.is_within_limit() {
            out.arguments(self.next - 1, part);
        }
    }

    /// Adds the next character of the open call's arguments.
    #[inline]
    pub(crate) fn argument(&mut self, c: char, out: &mut OutputPieceWriter<'_>) {
        if self.is_within_limit() {
            out.argument(self.next - 1, c);
        }
    }

    /// Completes the open call.
    pub(crate) fn end(&mut self, out: &mut OutputPieceWriter<'_>) {
        (self.open, self.after_call) = (false, true);
        if self.is_within_limit() {
            self.complete += 1;
            out.end_call(self.next - 1);
        }
    }

    /// Ends the open call, if any, as malformed; the text of the call ends before byte `to` of the output.
    pub(crate) fn break_call(&mut self, to: usize, out: &mut OutputPieceWriter<'_>) {
        if std::mem::take(&mut self.open) && self.is_within_limit() {
            out.broken_call(self.next - 1, to);
        }
    }

    /// Ends the output. Whitespace held back after a call is dropped.
    pub(crate) fn finish(&mut self, out: &mut OutputPieceWriter<'_>) {
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
