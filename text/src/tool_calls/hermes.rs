//! One JSON object per call after a marker; an output may contain several calls. Hermes, Qwen2.5 and Qwen3
//! write the object between `<tool_call>` and `</tool_call>`, Granite 20B after `<function_call>`.
//!
//! Source: the chat templates of Qwen/Qwen2.5-7B-Instruct, Qwen/Qwen3-8B and
//! ibm-granite/granite-20b-functioncalling.

use super::call_emitter::ToolCallEmitter;
use super::call_object::{CallObjectParser, CallParseStatus};
use super::marked_text::ContentMarkerScanner;
use crate::output_pieces::OutputPieceWriter;

pub(super) const OPEN: &str = "<tool_call>";
pub(super) const CLOSE: &str = "</tool_call>";

/// Opening marker of a call in Granite 20B.
pub(super) const FUNCTION_CALL: &str = "<function_call>";

/// Markers of a syntax: the opening marker, and the closing marker if the syntax has one.
#[derive(Debug)]
pub(super) struct HermesMarkers {
    markers: &'static [&'static str],
}

/// Markers of Hermes, Qwen2.5 and Qwen3.
pub(super) const HERMES: HermesMarkers = HermesMarkers { markers: &[OPEN, CLOSE] };
/// Markers of Granite 20B.
pub(super) const GRANITE_20B: HermesMarkers = HermesMarkers { markers: &[FUNCTION_CALL] };

/// Parser of tool calls in Hermes syntax.
#[derive(Debug, Clone)]
pub(super) struct HermesToolParser {
    markers: &'static [&'static str],
    text: ContentMarkerScanner,
    call: Option<CallObjectParser>,
}

impl HermesToolParser {
    pub(super) fn new(markers: &HermesMarkers) -> Self {
        Self { markers: markers.markers, text: ContentMarkerScanner::default(), call: None }
    }

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
        match self.text.push(c, self.markers, emitter, out) {
            Some(0) => {
                self.text.open(self.markers[0], emitter, out);
                self.call = Some(CallObjectParser::new(None, self.text.unparsed.from));
            }
            Some(index) => self.text.close(self.markers[index], emitter, out),
            None => {}
        }
    }
}
