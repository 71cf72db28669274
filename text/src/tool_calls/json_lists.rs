//! Tool calls as a JSON array of call objects: Granite, Phi-4-mini and xLAM. The array follows a marker, or
//! is at the beginning of the output.
//!
//! Sources: the chat templates of ibm-granite/granite-3.1-8b-instruct, microsoft/Phi-4-mini-instruct and
//! Salesforce/Llama-xLAM-2-8b-fc-r.

use super::call_emitter::ToolCallEmitter;
use super::call_list::CallListParser;
use super::call_object::{AllowedFunctionNames, CallParseStatus};
use super::hermes;
use super::json_scanner::is_space;
use super::marked_text::ContentMarkerScanner;
use crate::output_pieces::OutputPieceWriter;

/// Markers around the array of calls of one model family. If `allows_bare`, an array at the beginning of an
/// output needs no marker, but all its function names must be tools of the request.
#[derive(Debug)]
pub(super) struct JsonListSyntax {
    pub openers: &'static [&'static str],
    pub closers: &'static [&'static str],
    pub allows_bare: bool,
    /// Optional word between the opening marker and the list, such as `json`; empty = none.
    pub label: &'static str,
}

pub(super) static GRANITE: JsonListSyntax = JsonListSyntax {
    openers: &["<|tool_call|>", hermes::OPEN],
    closers: &[hermes::CLOSE],
    allows_bare: true,
    label: "",
};

pub(super) static PHI4_MINI: JsonListSyntax = JsonListSyntax {
    openers: &["functools", "<|tool_call|>"],
    closers: &["<|/tool_call|>"],
    allows_bare: false,
    label: "",
};

pub(super) static XLAM: JsonListSyntax = JsonListSyntax {
    openers: &["```", hermes::OPEN],
    closers: &["```", hermes::CLOSE],
    allows_bare: true,
    label: "json",
};

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

    pub(super) fn push(
        &mut self,
        c: char,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) {
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

    pub(super) fn finish(
        &mut self,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) {
        match &self.state {
            JsonListParserState::Start | JsonListParserState::Text => {
                self.text.finish(emitter, out);
            }
            JsonListParserState::List(list) if list.is_after_object() => {}
            _ => self.text.reject_call(out.bytes_read, emitter, out),
        }
    }

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
