//! Text of an output outside of calls: finds the markers of calls, and holds back the text of a call until
//! the call begins to be emitted. It is shared by the parsers of all syntaxes with markers.

use super::call_emitter::ToolCallEmitter;
use super::call_object::CallParseStatus;
use super::marker_scanner::MarkerScanner;
use super::unparsed_syntax::UnparsedCallText;
use crate::output_pieces::OutputPieceWriter;

/// Scans the text outside of calls for markers, and emits the text that is not a marker as content.
#[derive(Debug, Clone, Default)]
pub(super) struct ContentMarkerScanner {
    /// Scanner of the markers, including the markers inside a call.
    pub scanner: MarkerScanner,
    /// Held-back text of a call of which no part has been emitted yet.
    pub unparsed: UnparsedCallText,
    /// Whether a call is complete, but its closing marker has not been read.
    pub closing: bool,
}

impl ContentMarkerScanner {
    /// Processes a character outside of calls: emits content, or returns the index of the marker that the
    /// character completes.
    pub(super) fn push(
        &mut self,
        c: char,
        markers: &[&'static str],
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) -> Option<usize> {
        self.scanner.push(c, markers, |c| emitter.content(c, out))
    }

    /// Begins to read a call after an opening marker.
    pub(super) fn open(
        &mut self,
        marker: &str,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) {
        self.closing = false;
        self.unparsed.open(marker, emitter, out);
    }

    /// Drops a closing marker that follows a call. Any other closing marker is content.
    pub(super) fn close(
        &mut self,
        marker: &str,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) {
        if std::mem::take(&mut self.closing) && emitter.is_after_call() {
            emitter.drop_space();
        } else {
            marker.chars().for_each(|c| emitter.content(c, out));
        }
    }

    /// Updates the held-back text of a call after its next character `c`; `step` is the parse status after
    /// `c`. If `c` is not part of a call, rejects the call and returns false.
    pub(super) fn apply_step(
        &mut self,
        c: char,
        step: CallParseStatus,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) -> bool {
        let is_part = self.unparsed.apply_step(c, step, emitter);
        if !is_part {
            self.reject_call(out.start_of(c), emitter, out);
        }
        is_part
    }

    /// Rejects a call as malformed: its text before byte `to` of the output becomes content.
    pub(super) fn reject_call(
        &mut self,
        to: usize,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) {
        self.unparsed.reject_call(to, emitter, out);
        self.scanner = MarkerScanner::default();
    }

    /// Ends an output outside of calls: emits the text held back.
    pub(super) fn finish(
        &mut self,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) {
        self.scanner.finish(|c| emitter.content(c, out));
    }
}
