//! Tool calls between markers, with the function name before the JSON of the arguments. The text before the JSON is a
//! function name; a type, a function name and the start of a code fence; or `functions.NAME:INDEX`.

use super::ToolCallParserOptions;
use super::call_emitter::ToolCallEmitter;
use super::call_grammar::{CallDelimiters, CallGrammarWriter, CallWrapperText};
use super::call_object::{CallArgumentsParser, CallParseStatus};
use super::free_grammar::{CallOpening, ToolCallStarts};
use super::json_scanner::is_space;
use super::marked_text::ContentMarkerScanner;
use super::syntax_kind::{CallParser, SyntaxKind};
use super::tool_definition::ToolDefinition;
use crate::output_pieces::OutputPieceWriter;

/// Text that opens the arguments of a fenced call.
const FENCE: &str = "```json";
const FENCE_END: &str = "```";
/// Maximum number of bytes between the opening marker of a call and its arguments.
const HEAD_MAX: usize = 512;

/// Format of the text between the opening marker of a call and the separator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CallHeaderFormat {
    /// The text is the function name.
    Name,
    /// The text is the call type; the function name is between the separator and a code fence.
    Type,
    /// The text is `functions.NAME:INDEX`.
    Index,
}

/// Markers of the call syntax of one model family.
#[derive(Debug)]
pub(crate) struct JsonSectionSyntax {
    /// Marker before all calls, which models may omit.
    pub section_open: &'static str,
    pub section_close: &'static str,
    pub call_open: &'static str,
    pub call_close: &'static str,
    /// Marker before the arguments, or, in a fenced call, before the function name.
    pub separator: &'static str,
    pub head: CallHeaderFormat,
    /// Text that the model generates between calls.
    pub between: &'static str,
}

impl JsonSectionSyntax {
    /// Returns the markers that are recognised outside of calls. The last one, the end of a code fence, is a
    /// marker only after a fenced call.
    fn content_markers(&self) -> [&'static str; 5] {
        [self.call_open, self.section_open, self.section_close, self.call_close, FENCE_END]
    }
}

impl SyntaxKind for JsonSectionSyntax {
    fn parser(&'static self, _options: ToolCallParserOptions<'_>) -> Option<Box<dyn CallParser>> {
        Some(Box::new(JsonSectionToolParser::new(self)))
    }

    fn special_markers(&self) -> Vec<&'static str> {
        let Self { section_open, section_close, call_open, call_close, separator, .. } = *self;
        vec![section_open, section_close, call_open, call_close, separator]
    }

    fn opening_marker(&self) -> Option<&'static str> {
        Some(self.section_open)
    }

    fn delimiters(&self, _writer: &CallGrammarWriter<'_>) -> CallDelimiters {
        CallDelimiters::new(self.section_open, self.between, self.section_close)
    }

    fn call_text(&self, name: &str, writer: &CallGrammarWriter<'_>) -> CallWrapperText {
        let Self { call_open: open, separator, call_close: close, .. } = *self;
        match self.head {
            CallHeaderFormat::Name => {
                CallWrapperText::new(&format!("{open}{name}{separator}"), close)
            }
            CallHeaderFormat::Type => CallWrapperText::new(
                &format!("{open}function{separator}{name}\n{FENCE}\n"),
                &format!("\n{FENCE_END}{close}"),
            ),
            CallHeaderFormat::Index => {
                let infix = format!("/[0-9]{{1,3}}/ {}", writer.text(separator));
                let text = CallWrapperText::new(&format!("{open}functions.{name}:"), close);
                CallWrapperText { infix, ..text }
            }
        }
    }

    fn starts(
        &self,
        _tools: &[&ToolDefinition],
        writer: &CallGrammarWriter<'_>,
    ) -> Option<ToolCallStarts> {
        let section = CallOpening::list(self.section_open, self.delimiters(writer));
        Some(ToolCallStarts::marked(vec![section, CallOpening::bare(self.call_open)]))
    }
}

#[derive(Debug, Clone, Default)]
enum JsonSectionParserState {
    #[default]
    Text,
    /// Text before the separator.
    Head(String),
    /// Function name of a fenced call.
    Name(String),
    Arguments(CallArgumentsParser),
}

/// Parser of tool calls with a function name before the JSON of the
/// arguments.
#[derive(Debug, Clone)]
pub(super) struct JsonSectionToolParser {
    syntax: &'static JsonSectionSyntax,
    text: ContentMarkerScanner,
    state: JsonSectionParserState,
    /// Number of closing markers after the last call that have been read or skipped. They occur in this
    /// order: the end of the code fence, of the call and of the section.
    closed: usize,
}

impl JsonSectionToolParser {
    pub(super) fn new(syntax: &'static JsonSectionSyntax) -> Self {
        Self {
            syntax,
            text: ContentMarkerScanner::default(),
            state: JsonSectionParserState::Text,
            closed: 0,
        }
    }
}

impl CallParser for JsonSectionToolParser {
    fn push(&mut self, c: char, emitter: &mut ToolCallEmitter, out: &mut OutputPieceWriter<'_>) {
        let step = match &mut self.state {
            JsonSectionParserState::Text => return self.text(c, emitter, out),
            JsonSectionParserState::Head(_) | JsonSectionParserState::Name(_) => {
                self.head(c, emitter, out)
            }
            JsonSectionParserState::Arguments(arguments) => arguments.push(c, emitter, out),
        };
        if step == CallParseStatus::Done {
            (self.state, self.closed) = (JsonSectionParserState::Text, 0);
        }
        if !self.text.apply_step(c, step, emitter, out) {
            self.state = JsonSectionParserState::Text;
            self.text(c, emitter, out);
        }
    }

    fn finish(&mut self, emitter: &mut ToolCallEmitter, out: &mut OutputPieceWriter<'_>) {
        if matches!(self.state, JsonSectionParserState::Text) {
            // An opening marker that is not followed by a call is content.
            self.text.unparsed.release(emitter, out);
            self.text.finish(emitter, out);
        } else {
            self.text.reject_call(out.bytes_read, emitter, out);
        }
    }

    fn boxed_clone(&self) -> Box<dyn CallParser> {
        Box::new(self.clone())
    }
}

impl JsonSectionToolParser {
    fn text(&mut self, c: char, emitter: &mut ToolCallEmitter, out: &mut OutputPieceWriter<'_>) {
        let syntax = self.syntax;
        let markers = syntax.content_markers();
        let fenced = syntax.head == CallHeaderFormat::Type && emitter.is_after_call();
        let markers = if fenced { &markers[..] } else { &markers[..4] };
        let ContentMarkerScanner { scanner, unparsed, .. } = &mut self.text;
        let found = scanner.push(c, markers, |c| {
            if is_space(c) && !unparsed.is_empty() && !unparsed.is_full() {
                return unparsed.push(c);
            }
            unparsed.release(emitter, out);
            emitter.content(c, out);
        });
        match found {
            Some(0) => {
                self.text.unparsed.open(syntax.call_open, emitter, out);
                self.state = JsonSectionParserState::Head(String::new());
            }
            Some(1) => self.text.unparsed.open(syntax.section_open, emitter, out),
            Some(2) => self.close(3, syntax.section_close, emitter, out),
            Some(3) => self.close(2, syntax.call_close, emitter, out),
            Some(_) => self.close(1, FENCE_END, emitter, out),
            None => {}
        }
    }

    /// Processes the closing marker `marker`: drops it if it follows a call, otherwise emits it as content.
    /// `order` is the index of the marker among the closing markers of a call.
    fn close(
        &mut self,
        order: usize,
        marker: &str,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) {
        if emitter.is_after_call() && self.closed < order && self.text.unparsed.is_empty() {
            self.closed = order;
            return emitter.drop_space();
        }
        self.text.unparsed.release(emitter, out);
        marker.chars().for_each(|c| emitter.content(c, out));
    }

    /// Parses a character between the opening marker of a call and its arguments.
    fn head(
        &mut self,
        c: char,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) -> CallParseStatus {
        let (text, end, is_name) = match &mut self.state {
            JsonSectionParserState::Head(text) => {
                (text, self.syntax.separator, self.syntax.head != CallHeaderFormat::Type)
            }
            JsonSectionParserState::Name(text) => (text, FENCE, true),
            _ => return CallParseStatus::Invalid,
        };
        let found = self.text.scanner.push(c, &[end], |c| text.push(c));
        if text.len() > HEAD_MAX {
            return CallParseStatus::Invalid;
        }
        if found.is_none() {
            return CallParseStatus::Continues;
        }
        let text = std::mem::take(text);
        if is_name {
            return self.begin(&text, emitter, out);
        }
        self.state = JsonSectionParserState::Name(String::new());
        CallParseStatus::Continues
    }

    fn begin(
        &mut self,
        head: &str,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) -> CallParseStatus {
        let mut name = head.trim();
        if self.syntax.head == CallHeaderFormat::Index {
            name = name.strip_prefix("functions.").unwrap_or(name);
            let indexed = name.rsplit_once(':');
            let is_index = |index: &str| index.bytes().all(|byte| byte.is_ascii_digit());
            name = indexed.filter(|(_, index)| is_index(index)).map_or(name, |(name, _)| name);
        }
        if name.is_empty() || name.contains('\n') {
            return CallParseStatus::Invalid;
        }
        emitter.begin(name, self.text.unparsed.from, out);
        self.state = JsonSectionParserState::Arguments(CallArgumentsParser::default());
        CallParseStatus::Continues
    }
}
