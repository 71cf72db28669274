//! One JSON object per call after a marker; an output may contain several calls.

use super::ToolCallParserOptions;
use super::call_emitter::ToolCallEmitter;
use super::call_grammar::{CallDelimiters, CallGrammarWriter, CallWrapperText};
use super::call_object::{CallObjectParser, CallParseStatus};
use super::free_grammar::{CallOpening, ToolCallStarts};
use super::marked_text::ContentMarkerScanner;
use super::syntax_kind::{CallParser, SyntaxKind};
use super::tool_definition::ToolDefinition;
use crate::output_pieces::OutputPieceWriter;

/// Markers around the object of a call of one model family.
#[derive(Debug)]
pub(crate) struct JsonObjectSyntax {
    /// Opening marker, and the closing marker if the syntax has one.
    pub markers: &'static [&'static str],
    /// Text that the model generates between a marker and the object.
    pub gap: &'static str,
    /// Text that the model generates between calls.
    pub between: &'static str,
}

impl SyntaxKind for JsonObjectSyntax {
    fn parser(&'static self, _options: ToolCallParserOptions<'_>) -> Option<Box<dyn CallParser>> {
        Some(Box::new(JsonObjectToolParser::new(self.markers)))
    }

    fn special_markers(&self) -> Vec<&'static str> {
        self.markers.to_vec()
    }

    fn opening_marker(&self) -> Option<&'static str> {
        Some(self.markers[0])
    }

    fn delimiters(&self, _writer: &CallGrammarWriter<'_>) -> CallDelimiters {
        CallDelimiters::new("", self.between, "")
    }

    fn call_text(&self, name: &str, _writer: &CallGrammarWriter<'_>) -> CallWrapperText {
        let object = CallWrapperText::json_object(name, "arguments");
        let closer = self.markers.get(1).map(|close| format!("{}{close}", self.gap));
        let head = format!("{}{}{}", self.markers[0], self.gap, object.head);
        CallWrapperText::new(&head, &format!("{}{}", object.tail, closer.unwrap_or_default()))
    }

    fn starts(
        &self,
        _tools: &[&ToolDefinition],
        _writer: &CallGrammarWriter<'_>,
    ) -> Option<ToolCallStarts> {
        Some(ToolCallStarts::marked(vec![CallOpening::single(self.markers[0])]))
    }
}

/// Parser of tool calls that are JSON objects after a marker.
#[derive(Debug, Clone)]
pub(super) struct JsonObjectToolParser {
    markers: &'static [&'static str],
    text: ContentMarkerScanner,
    call: Option<CallObjectParser>,
}

impl JsonObjectToolParser {
    pub(super) fn new(markers: &'static [&'static str]) -> Self {
        Self { markers, text: ContentMarkerScanner::default(), call: None }
    }
}

impl CallParser for JsonObjectToolParser {
    fn push(&mut self, c: char, emitter: &mut ToolCallEmitter, out: &mut OutputPieceWriter<'_>) {
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

    fn finish(&mut self, emitter: &mut ToolCallEmitter, out: &mut OutputPieceWriter<'_>) {
        self.text.finish(emitter, out);
        self.call = None;
        self.text.reject_call(out.bytes_read, emitter, out);
    }

    fn boxed_clone(&self) -> Box<dyn CallParser> {
        Box::new(self.clone())
    }
}

impl JsonObjectToolParser {
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
