//! Parser of tool calls that are written as tags around plain-text values.

use super::CallEnforcement;
use super::call_emitter::ToolCallEmitter;
use super::call_object::CallParseStatus;
use super::json_scanner::is_space;
use super::marked_text::ContentMarkerScanner;
use super::schema_types::{ArgumentTypeCache, JsonTypeSet, quoted};
use super::syntax_kind::CallParser;
use super::tag_syntax::{TagSyntax, ValueConversion};
use super::tool_definition::ToolDefinition;
use super::value_text::ArgumentValueParser;
use crate::output_pieces::OutputPieceWriter;
use std::sync::Arc;

/// Maximum number of bytes of a function name or a parameter key.
pub(super) const NAME_MAX: usize = 256;
/// Characters that cannot occur in a function name; text that contains one is not a call.
const NO_NAME: &[char] = &['<', '>', '{', '}', '"', '\'', '\n'];

#[derive(Debug, Clone, Default)]
enum TaggedParserState {
    #[default]
    Text,
    /// After the wrapper's opening tag: a call must follow.
    Lead,
    Name(String),
    /// After the function name or a parameter: another parameter or the end of the call must follow.
    Between,
    Key(String),
    /// After a key: one of the texts that open its value must follow.
    Opening(String),
    Value(ArgumentValueParser),
}

/// Parser of tool calls that are written as tags.
#[derive(Debug, Clone)]
pub(super) struct TaggedToolParser {
    syntax: &'static TagSyntax,
    schemas: ArgumentTypeCache,
    /// For each tool, whether a grammar guarantees that the JSON values in its calls are valid.
    is_enforced: Vec<bool>,
    /// Markers that are searched for in the text outside of calls.
    text_markers: Vec<&'static str>,
    /// Texts that may open a value.
    value_markers: Vec<&'static str>,
    text: ContentMarkerScanner,
    state: TaggedParserState,
    /// Index of the called tool; `None` = no tool has this name.
    tool: Option<usize>,
    /// Whether a parameter of the call has been emitted.
    has_parameters: bool,
}

impl TaggedToolParser {
    pub(super) fn new(
        syntax: &'static TagSyntax,
        tools: Arc<[ToolDefinition]>,
        enforcement: CallEnforcement,
    ) -> Self {
        let is_enforced = tools.iter().map(|tool| enforcement.applies_to(tool)).collect();
        let wrapper = syntax.wrapper.map(|tags| [tags.open, tags.close]);
        let text_markers = wrapper.into_iter().flatten().chain([syntax.call.open]).collect();
        Self {
            syntax,
            schemas: ArgumentTypeCache::new(tools),
            is_enforced,
            text_markers,
            value_markers: syntax.value_openings.iter().map(|opening| opening.text).collect(),
            text: ContentMarkerScanner::default(),
            state: TaggedParserState::Text,
            tool: None,
            has_parameters: false,
        }
    }
}

impl CallParser for TaggedToolParser {
    fn push(&mut self, c: char, emitter: &mut ToolCallEmitter, out: &mut OutputPieceWriter<'_>) {
        if matches!(self.state, TaggedParserState::Text) {
            return self.text(c, emitter, out);
        }
        let step = match self.syntax(c, emitter, out) {
            false => CallParseStatus::Invalid,
            true if matches!(self.state, TaggedParserState::Text) => CallParseStatus::Done,
            true => CallParseStatus::Continues,
        };
        if !self.text.apply_step(c, step, emitter, out) {
            self.state = TaggedParserState::Text;
            self.text(c, emitter, out);
        }
    }

    fn finish(&mut self, emitter: &mut ToolCallEmitter, out: &mut OutputPieceWriter<'_>) {
        if matches!(self.state, TaggedParserState::Text) {
            self.text.finish(emitter, out);
        } else {
            self.text.reject_call(out.bytes_read, emitter, out);
        }
    }

    fn boxed_clone(&self) -> Box<dyn CallParser> {
        Box::new(self.clone())
    }
}

impl TaggedToolParser {
    fn text(&mut self, c: char, emitter: &mut ToolCallEmitter, out: &mut OutputPieceWriter<'_>) {
        let found = self.text.push(c, &self.text_markers, emitter, out);
        let Some(found) = found else { return };
        let marker = self.text_markers[found];
        if marker == self.syntax.call.open {
            self.start(marker, TaggedParserState::Name(String::new()), emitter, out);
        } else if self.syntax.wrapper.is_some_and(|tags| tags.open == marker) {
            self.start(marker, TaggedParserState::Lead, emitter, out);
        } else {
            self.text.close(marker, emitter, out);
        }
    }

    fn start(
        &mut self,
        marker: &str,
        state: TaggedParserState,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) {
        self.state = state;
        self.text.open(marker, emitter, out);
    }

    /// Parses a character inside a call; returns false if the character is invalid there.
    fn syntax(
        &mut self,
        c: char,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) -> bool {
        let mut is_valid = true;
        match &mut self.state {
            TaggedParserState::Text => return false,
            TaggedParserState::Lead => {
                let markers = [self.syntax.call.open];
                if self.text.scanner.push(c, &markers, |c| is_valid &= is_space(c)).is_some() {
                    self.state = TaggedParserState::Name(String::new());
                }
                is_valid &= self.text.unparsed.len() <= NAME_MAX;
            }
            TaggedParserState::Name(name) => {
                let found = self.text.scanner.push(c, self.syntax.name_ends, |c| name.push(c));
                if name.len() > NAME_MAX || name.contains(NO_NAME) {
                    return false;
                }
                let Some(found) = found else { return true };
                let (name, end) = (std::mem::take(name), self.syntax.name_ends[found]);
                if end == "\n" && name.trim().is_empty() {
                    return self.text.unparsed.len() <= NAME_MAX;
                }
                return self.begin(name.trim(), end, emitter, out);
            }
            TaggedParserState::Between => return self.between(c, emitter, out),
            TaggedParserState::Key(key) => {
                let found = self.text.scanner.push(c, &[self.syntax.key_end], |c| key.push(c));
                is_valid = key.len() <= NAME_MAX && !key.contains(['<', '\n']);
                if found.is_some() {
                    let key = std::mem::take(key);
                    self.key(key, emitter, out);
                }
            }
            TaggedParserState::Opening(key) => {
                let markers = &self.value_markers;
                let found = self.text.scanner.push(c, markers, |c| is_valid &= is_space(c));
                if let Some(found) = found {
                    let key = std::mem::take(key);
                    self.value(&key, self.syntax.value_openings[found].form, emitter, out);
                }
            }
            TaggedParserState::Value(_) => return self.in_value(c, emitter, out),
        }
        is_valid
    }

    /// Begins the call of the function `name`; `end` is the text that ended the name.
    fn begin(
        &mut self,
        name: &str,
        end: &str,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) -> bool {
        if name.is_empty() {
            return false;
        }
        self.tool = self.schemas.tool(name);
        self.has_parameters = false;
        emitter.begin(name, self.text.unparsed.from, out);
        emitter.arguments("{", out);
        self.state = TaggedParserState::Between;
        if end == self.syntax.parameter_open {
            self.state = TaggedParserState::Key(String::new());
        } else if end == self.syntax.call.close {
            self.end(emitter, out);
        }
        true
    }

    fn between(
        &mut self,
        c: char,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) -> bool {
        let mut is_valid = true;
        let markers = [self.syntax.parameter_open, self.syntax.call.close];
        match self.text.scanner.push(c, &markers, |c| is_valid &= is_space(c)) {
            Some(0) => self.state = TaggedParserState::Key(String::new()),
            Some(_) => self.end(emitter, out),
            None => {}
        }
        is_valid
    }

    fn key(&mut self, key: String, emitter: &mut ToolCallEmitter, out: &mut OutputPieceWriter<'_>) {
        if self.value_markers.is_empty() {
            self.value(&key, ValueConversion::Typed, emitter, out);
        } else {
            self.state = TaggedParserState::Opening(key);
        }
    }

    /// Begins a parameter: emits its key as JSON and prepares the parser of its value.
    fn value(
        &mut self,
        key: &str,
        form: ValueConversion,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) {
        let key = key.trim();
        let comma = if std::mem::replace(&mut self.has_parameters, true) { ", " } else { "" };
        emitter.arguments(comma, out);
        emitter.arguments(&quoted(key), out);
        emitter.arguments(": ", out);
        let types = match form {
            ValueConversion::Typed => self.schemas.types(self.tool, key),
            ValueConversion::Text => JsonTypeSet::text(),
            ValueConversion::Json => JsonTypeSet::json(),
        };
        let is_exact = self.tool.is_some_and(|tool| self.is_enforced[tool]);
        let value = ArgumentValueParser::new(types, self.syntax.wraps_values, is_exact);
        self.state = TaggedParserState::Value(value);
    }

    fn in_value(
        &mut self,
        c: char,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) -> bool {
        let TaggedParserState::Value(value) = &mut self.state else { return false };
        let is_inside_json = value.is_inside_json();
        let mut add = |c: char| value.push(c, |s| emitter.arguments(s, out));
        if is_inside_json {
            return add(c);
        }
        let mut is_valid = true;
        let found = self.text.scanner.push(c, self.syntax.value_ends, |c| is_valid &= add(c));
        let Some(found) = found else { return is_valid };
        value.finish(|s| emitter.arguments(s, out));
        let (end, syntax) = (self.syntax.value_ends[found], self.syntax);
        if found == 0 {
            self.state = TaggedParserState::Between;
        } else if end == syntax.parameter_open {
            self.state = TaggedParserState::Key(String::new());
        } else {
            self.end(emitter, out);
            self.text.closing = end == syntax.call.close;
        }
        true
    }

    fn end(&mut self, emitter: &mut ToolCallEmitter, out: &mut OutputPieceWriter<'_>) {
        emitter.arguments("}", out);
        emitter.end(out);
        (self.state, self.text.closing) = (TaggedParserState::Text, true);
    }
}
