//! Parsers of a tool call written as a JSON object, `{"name": …, "arguments": {…}}` (`parameters` is an alias
//! of `arguments`), and of an arguments object alone.
//!
//! Once the name is known, the arguments are emitted while they are generated. Arguments that come before the
//! name are held back until the name is known.

use super::ToolDefinition;
use super::call_emitter::ToolCallEmitter;
use super::json_scanner::{JsonScanStatus, JsonScanner, is_space};
use crate::output_pieces::OutputPieceWriter;
use std::sync::Arc;

/// Maximum length of a function name in bytes, in JSON form.
const NAME_MAX: usize = 512;
/// Maximum number of argument bytes held back until the name is known.
const BUFFERED_ARGUMENTS_MAX: usize = 64 << 10;

/// State of a tool call after the next character.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CallParseStatus {
    /// The call continues.
    Continues,
    /// The call ends with this character.
    Done,
    /// The text is not a valid call.
    Invalid,
}

/// Names of the functions that may be called; `None` allows any function.
pub(super) type AllowedFunctionNames = Option<Arc<[String]>>;

/// Returns the names of `tools`, the tools of a request.
pub(super) fn allowed_names(tools: &[ToolDefinition]) -> Arc<[String]> {
    tools.iter().map(|tool| tool.name.clone()).collect()
}

#[derive(Debug, Clone)]
enum CallObjectState {
    Open,
    Key,
    InKey,
    Colon,
    Value,
    Next,
}

/// Member of a call object whose value is being read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CallMember {
    Name,
    Arguments,
    /// `id` or `type`, whose value is dropped.
    Other,
}

/// Parser of one call object; keeps the state between two characters.
#[derive(Debug, Clone)]
pub(super) struct CallObjectParser {
    names: AllowedFunctionNames,
    state: CallObjectState,
    member: CallMember,
    json: JsonScanner,
    /// JSON text of the current key or function name.
    token_text: String,
    has_name: bool,
    /// Whether the arguments have been read completely.
    has_arguments: bool,
    /// Arguments that came before the name and are held back.
    buffered_arguments: String,
    from: usize,
}

impl CallObjectParser {
    /// Creates a parser of a call whose syntax begins at byte `from` of the output.
    pub(super) fn new(names: AllowedFunctionNames, from: usize) -> Self {
        Self {
            names,
            state: CallObjectState::Open,
            member: CallMember::Other,
            json: JsonScanner::default(),
            token_text: String::new(),
            has_name: false,
            has_arguments: false,
            buffered_arguments: String::new(),
            from,
        }
    }

    /// Processes the next character of the call object.
    pub(super) fn push(
        &mut self,
        c: char,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) -> CallParseStatus {
        match self.state {
            CallObjectState::InKey => self.key(c),
            CallObjectState::Value => self.value(c, emitter, out),
            _ if is_space(c) => CallParseStatus::Continues,
            CallObjectState::Open if c == '{' => self.go(CallObjectState::Key),
            CallObjectState::Key if c == '"' => {
                self.token_text = String::from('"');
                self.json = JsonScanner::default();
                self.json.push(c);
                self.go(CallObjectState::InKey)
            }
            CallObjectState::Colon if c == ':' => {
                self.json = JsonScanner::default();
                self.token_text.clear();
                self.go(CallObjectState::Value)
            }
            CallObjectState::Next if c == ',' => self.go(CallObjectState::Key),
            CallObjectState::Next if c == '}' => self.close(emitter, out),
            _ => CallParseStatus::Invalid,
        }
    }

    fn go(&mut self, state: CallObjectState) -> CallParseStatus {
        self.state = state;
        CallParseStatus::Continues
    }

    fn key(&mut self, c: char) -> CallParseStatus {
        self.token_text.push(c);
        match self.json.push(c) {
            JsonScanStatus::Continues if self.token_text.len() < NAME_MAX => {
                return CallParseStatus::Continues;
            }
            JsonScanStatus::Done => {}
            _ => return CallParseStatus::Invalid,
        }
        self.member = match self.token_text.as_str() {
            "\"name\"" if !self.has_name => CallMember::Name,
            "\"arguments\"" | "\"parameters\"" if !self.has_arguments => CallMember::Arguments,
            "\"id\"" | "\"type\"" => CallMember::Other,
            _ => return CallParseStatus::Invalid,
        };
        self.go(CallObjectState::Colon)
    }

    fn value(
        &mut self,
        c: char,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) -> CallParseStatus {
        let is_first = self.token_text.is_empty();
        if is_first && is_space(c) {
            return CallParseStatus::Continues;
        }
        let scan = self.json.push(c);
        if scan == JsonScanStatus::Invalid {
            return CallParseStatus::Invalid;
        }
        match self.member {
            CallMember::Arguments => {
                if is_first && c != '{' {
                    return CallParseStatus::Invalid;
                }
                if is_first {
                    // A non-empty `token_text` means that the arguments have begun. Later characters of the
                    // arguments are not added to `token_text`.
                    self.token_text.push(c);
                }
                self.argument(c, emitter, out);
            }
            CallMember::Name | CallMember::Other if self.token_text.len() >= NAME_MAX => {
                return CallParseStatus::Invalid;
            }
            CallMember::Name | CallMember::Other => self.token_text.push(c),
        }
        match scan {
            JsonScanStatus::Done if self.member == CallMember::Name => self.name(emitter, out),
            JsonScanStatus::Done => {
                self.has_arguments |= self.member == CallMember::Arguments;
                self.go(CallObjectState::Next)
            }
            // Only a number ends before the current character. A number is neither a name nor arguments, so
            // the current character is parsed as part of the call object.
            JsonScanStatus::EndedBefore if self.member == CallMember::Other => {
                self.state = CallObjectState::Next;
                self.push(c, emitter, out)
            }
            JsonScanStatus::EndedBefore | JsonScanStatus::Invalid => CallParseStatus::Invalid,
            JsonScanStatus::Continues if self.buffered_arguments.len() > BUFFERED_ARGUMENTS_MAX => {
                CallParseStatus::Invalid
            }
            JsonScanStatus::Continues => CallParseStatus::Continues,
        }
    }

    fn argument(
        &mut self,
        c: char,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) {
        if self.has_name {
            emitter.argument(c, out);
        } else {
            self.buffered_arguments.push(c);
        }
    }

    fn name(
        &mut self,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) -> CallParseStatus {
        let Ok(name) = serde_json::from_str::<String>(&self.token_text) else {
            return CallParseStatus::Invalid;
        };
        let is_known = self.names.as_ref().is_none_or(|names| names.contains(&name));
        if name.is_empty() || !is_known {
            return CallParseStatus::Invalid;
        }
        self.has_name = true;
        emitter.begin(&name, self.from, out);
        let buffered_arguments = std::mem::take(&mut self.buffered_arguments);
        if !buffered_arguments.is_empty() {
            emitter.arguments(&buffered_arguments, out);
        }
        self.go(CallObjectState::Next)
    }

    fn close(
        &mut self,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) -> CallParseStatus {
        if !self.has_name {
            return CallParseStatus::Invalid;
        }
        if !self.has_arguments {
            emitter.arguments("{}", out);
        }
        emitter.end(out);
        CallParseStatus::Done
    }
}

/// Parser of the arguments of a call whose function name is outside the JSON. The arguments are one JSON
/// object, which is emitted while it is generated.
#[derive(Debug, Clone, Default)]
pub(crate) struct CallArgumentsParser {
    json: JsonScanner,
    started: bool,
}

impl CallArgumentsParser {
    /// Processes the next character; the call itself has already begun. Whitespace before the object is
    /// dropped.
    pub(crate) fn push(
        &mut self,
        c: char,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) -> CallParseStatus {
        if !self.started {
            match c {
                '{' => self.started = true,
                _ if is_space(c) => return CallParseStatus::Continues,
                _ => return CallParseStatus::Invalid,
            }
        }
        let scan = self.json.push(c);
        if scan == JsonScanStatus::Invalid {
            return CallParseStatus::Invalid;
        }
        emitter.argument(c, out);
        if scan == JsonScanStatus::Done {
            emitter.end(out);
            return CallParseStatus::Done;
        }
        CallParseStatus::Continues
    }
}
