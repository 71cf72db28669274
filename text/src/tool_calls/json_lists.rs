//! Tool calls as a JSON array of call objects. The array follows a marker, or is at the beginning of the output.

use super::ToolCallParserOptions;
use super::call_emitter::ToolCallEmitter;
use super::call_grammar::{CallDelimiters, CallGrammarWriter, CallWrapperText};
use super::call_list::CallListParser;
use super::call_object::{AllowedFunctionNames, CallParseStatus, allowed_names};
use super::free_grammar::{CallOpening, OBJECT_START, ToolCallStarts};
use super::json_scanner::is_space;
use super::marked_text::ContentMarkerScanner;
use super::syntax_kind::{CallParser, SyntaxKind};
use super::tool_definition::ToolDefinition;
use crate::output_pieces::OutputPieceWriter;

/// Markers around the array of calls of one model family. If `allows_bare`, an array at the beginning of an
/// output needs no marker, but all its function names must be tools of the request.
#[derive(Debug)]
pub(crate) struct JsonListSyntax {
    pub openers: &'static [&'static str],
    pub closers: &'static [&'static str],
    pub allows_bare: bool,
    /// Optional word between the opening marker and the list, such as `json`; empty = none.
    pub label: &'static str,
    /// Markers of the lists that grammars allow; empty = the lists have no marker.
    pub written: &'static [ListMarkers],
    /// Texts that may be special tokens of a tokenizer.
    pub special: &'static [&'static str],
}

/// Markers around a list of calls.
#[derive(Debug)]
pub(crate) struct ListMarkers {
    pub open: &'static str,
    /// Marker after the list; empty = none.
    pub close: &'static str,
    /// Whether a forced list has these markers if `open` is a special token, and other markers if it is plain text.
    pub is_token: bool,
}

impl ListMarkers {
    fn delimiters(&self) -> CallDelimiters {
        CallDelimiters::new(&format!("{}[", self.open), ", ", &format!("]{}", self.close))
    }
}

impl SyntaxKind for JsonListSyntax {
    fn parser(&'static self, options: ToolCallParserOptions<'_>) -> Option<Box<dyn CallParser>> {
        Some(Box::new(JsonListToolParser::new(self, Some(allowed_names(options.tools)))))
    }

    fn special_markers(&self) -> Vec<&'static str> {
        self.special.to_vec()
    }

    fn delimiters(&self, writer: &CallGrammarWriter<'_>) -> CallDelimiters {
        let is_token = |one: &&ListMarkers| one.is_token && writer.has_special(one.open);
        let token = self.written.iter().find(is_token);
        let markers = token.or_else(|| self.written.iter().find(|one| !one.is_token));
        markers.map_or_else(|| CallDelimiters::new("[", ", ", "]"), ListMarkers::delimiters)
    }

    fn call_text(&self, name: &str, _writer: &CallGrammarWriter<'_>) -> CallWrapperText {
        CallWrapperText::json_object(name, "arguments")
    }

    fn starts(
        &self,
        _tools: &[&ToolDefinition],
        writer: &CallGrammarWriter<'_>,
    ) -> Option<ToolCallStarts> {
        let bare_start = format!("\\[\\s*{OBJECT_START}");
        if self.written.is_empty() {
            let delimiters = self.delimiters(writer);
            return Some(ToolCallStarts::at_start(bare_start, self.openers, delimiters));
        }
        let opening = |one: &ListMarkers| CallOpening::list(one.open, one.delimiters());
        let openings = self.written.iter().map(opening).collect();
        let bare_starts = if self.allows_bare { vec![bare_start] } else { Vec::new() };
        Some(ToolCallStarts { bare_starts, ..ToolCallStarts::marked(openings) })
    }
}

#[derive(Debug, Clone)]
enum JsonListParserState {
    /// The output is only whitespace so far.
    Start,
    Text,
    /// After an opening marker: the rest of the label (an optional word such as `json`) may follow, then the
    /// array.
    Lead {
        label: &'static str,
    },
    List(CallListParser),
}

/// Parser of tool calls that are a JSON array.
#[derive(Debug, Clone)]
pub(super) struct JsonListToolParser {
    syntax: &'static JsonListSyntax,
    names: AllowedFunctionNames,
    markers: Vec<&'static str>,
    text: ContentMarkerScanner,
    state: JsonListParserState,
}

impl JsonListToolParser {
    /// Creates a parser; `names` are the names of the request's tools.
    pub(super) fn new(syntax: &'static JsonListSyntax, names: AllowedFunctionNames) -> Self {
        let closers = syntax.closers.iter().filter(|closer| !syntax.openers.contains(closer));
        Self {
            syntax,
            names,
            markers: syntax.openers.iter().chain(closers).copied().collect(),
            text: ContentMarkerScanner::default(),
            state: JsonListParserState::Start,
        }
    }
}

impl CallParser for JsonListToolParser {
    fn push(&mut self, c: char, emitter: &mut ToolCallEmitter, out: &mut OutputPieceWriter<'_>) {
        let step = match &mut self.state {
            JsonListParserState::Start | JsonListParserState::Text => {
                return self.text(c, emitter, out);
            }
            JsonListParserState::Lead { label } => match label.strip_prefix(c) {
                Some(rest) => {
                    *label = rest;
                    CallParseStatus::Continues
                }
                None if is_space(c) => CallParseStatus::Continues,
                None => self.list(c, emitter, out),
            },
            JsonListParserState::List(list) => list.push(c, emitter, out),
        };
        if matches!(&self.state, JsonListParserState::List(list) if list.is_complete()) {
            (self.state, self.text.closing) = (JsonListParserState::Text, true);
        }
        if !self.text.apply_step(c, step, emitter, out) {
            self.state = JsonListParserState::Text;
            self.text(c, emitter, out);
        }
    }

    fn finish(&mut self, emitter: &mut ToolCallEmitter, out: &mut OutputPieceWriter<'_>) {
        match &self.state {
            JsonListParserState::Start | JsonListParserState::Text => {
                self.text.finish(emitter, out);
            }
            JsonListParserState::List(list) if list.is_after_object() => {}
            _ => self.text.reject_call(out.bytes_read, emitter, out),
        }
    }

    fn boxed_clone(&self) -> Box<dyn CallParser> {
        Box::new(self.clone())
    }
}

impl JsonListToolParser {
    fn text(&mut self, c: char, emitter: &mut ToolCallEmitter, out: &mut OutputPieceWriter<'_>) {
        if matches!(self.state, JsonListParserState::Start) && self.text.scanner.is_empty() {
            if c == '[' && self.syntax.allows_bare {
                self.text.unparsed.open("[", emitter, out);
                let mut list = CallListParser::new(self.names.clone(), self.text.unparsed.from);
                list.push(c, emitter, out);
                self.state = JsonListParserState::List(list);
                return;
            }
            if !is_space(c) {
                self.state = JsonListParserState::Text;
            }
        }
        let found = self.text.push(c, &self.markers, emitter, out);
        let Some(found) = found else { return };
        let marker = self.markers[found];
        let closes = self.syntax.closers.contains(&marker)
            && std::mem::take(&mut self.text.closing)
            && emitter.is_after_call();
        if closes {
            emitter.drop_space();
        } else if found < self.syntax.openers.len() {
            self.text.open(marker, emitter, out);
            self.state = JsonListParserState::Lead { label: self.syntax.label };
        } else {
            marker.chars().for_each(|c| emitter.content(c, out));
        }
    }

    /// Begins to parse the array of calls after an opening marker.
    fn list(
        &mut self,
        c: char,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) -> CallParseStatus {
        // Arrays in code fences are common in ordinary content, so they are parsed as calls only if they name
        // tools of the request.
        let names = self.names.clone().filter(|_| self.syntax.label == "json");
        let mut list = CallListParser::new(names, self.text.unparsed.from);
        let step = list.push(c, emitter, out);
        self.state = JsonListParserState::List(list);
        step
    }
}
