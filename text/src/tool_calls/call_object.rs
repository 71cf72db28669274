//! Parsers of a tool call written as a JSON object, `{"name": …, "arguments": {…}}` (`parameters` is an alias
//! of `arguments`), and of an arguments object alone.
//!
//! The arguments are emitted while they are generated once the name is known. If they come before the name,
//! they are held back until it is known.

use super::call_emitter::ToolCallEmitter;
use super::json_scanner::{JsonScanner, ScanStep, is_space};
use crate::output_pieces::PieceSink;
use std::sync::Arc;

/// Maximum number of bytes of a function name in its JSON form.
const NAME_MAX: usize = 512;
/// Maximum number of bytes of arguments that are held back before the name.
const BUFFERED_ARGUMENTS_MAX: usize = 64 << 10;

/// State of a tool call after one more character.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CallStep {
    /// The call continues.
    Continues,
    /// The call ends with this character.
    Done,
    /// The text is not a valid call.
    Invalid,
}

/// Names of the functions that may be called; `None` = any function.
pub(super) type FunctionNames = Option<Arc<[String]>>;

#[derive(Debug, Clone)]
enum CallObjectState {
    Open,
    Key,
    InKey,
    Colon,
    Value,
    Next,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CallMember {
    Name,
    Arguments,
    /// `id` and `type`, whose values are dropped.
    Other,
}

/// Parser of one call object; keeps the state between two characters.
#[derive(Debug, Clone)]
pub(super) struct CallObject {
    names: FunctionNames,
    state: CallObjectState,
    member: CallMember,
    json: JsonScanner,
    /// JSON text of the current key or function name.
    token_text: String,
    has_name: bool,
    /// Whether arguments have been read.
    has_arguments: bool,
    /// Arguments that came before the name, held back.
    buffered_arguments: String,
    from: usize,
}

impl CallObject {
    /// Creates a parser of a call whose syntax begins at byte `from` of the output.
    pub(super) fn new(names: FunctionNames, from: usize) -> Self {
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

    /// Processes the next character.
    pub(super) fn push(
        &mut self,
        c: char,
        emitter: &mut ToolCallEmitter,
        out: &mut PieceSink<'_>,
    ) -> CallStep {
        match self.state {
            CallObjectState::InKey => self.key(c),
            CallObjectState::Value => self.value(c, emitter, out),
            _ if is_space(c) => CallStep::Continues,
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
            _ => CallStep::Invalid,
        }
    }

    fn go(&mut self, state: CallObjectState) -> CallStep {
        self.state = state;
        CallStep::Continues
    }

    fn key(&mut self, c: char) -> CallStep {
        self.token_text.push(c);
        match self.json.push(c) {
            ScanStep::Continues if self.token_text.len() < NAME_MAX => return CallStep::Continues,
            ScanStep::Done => {}
            _ => return CallStep::Invalid,
        }
        self.member = match self.token_text.as_str() {
            "\"name\"" if !self.has_name => CallMember::Name,
            "\"arguments\"" | "\"parameters\"" if !self.has_arguments => CallMember::Arguments,
            "\"id\"" | "\"type\"" => CallMember::Other,
            _ => return CallStep::Invalid,
        };
        self.go(CallObjectState::Colon)
    }

    fn value(
        &mut self,
        c: char,
        emitter: &mut ToolCallEmitter,
        out: &mut PieceSink<'_>,
    ) -> CallStep {
        let is_first = self.token_text.is_empty();
        if is_first && is_space(c) {
            return CallStep::Continues;
        }
        let scan = self.json.push(c);
        if scan == ScanStep::Invalid {
            return CallStep::Invalid;
        }
        match self.member {
            CallMember::Arguments => {
                if is_first && c != '{' {
                    return CallStep::Invalid;
                }
                if is_first {
                    // The text only shows that the value has begun; further characters of arguments are not
                    // added to it.
                    self.token_text.push(c);
                }
                self.argument(c, emitter, out);
            }
            CallMember::Name | CallMember::Other if self.token_text.len() >= NAME_MAX => {
                return CallStep::Invalid;
            }
            CallMember::Name | CallMember::Other => self.token_text.push(c),
        }
        match scan {
            ScanStep::Done if self.member == CallMember::Name => self.name(emitter, out),
            ScanStep::Done => {
                self.has_arguments |= self.member == CallMember::Arguments;
                self.go(CallObjectState::Next)
            }
            // A number is neither a name nor arguments; the character after the number belongs to the call
            // object.
            ScanStep::EndedBefore if self.member == CallMember::Other => {
                self.state = CallObjectState::Next;
                self.push(c, emitter, out)
            }
            ScanStep::EndedBefore | ScanStep::Invalid => CallStep::Invalid,
            ScanStep::Continues if self.buffered_arguments.len() > BUFFERED_ARGUMENTS_MAX => {
                CallStep::Invalid
            }
            ScanStep::Continues => CallStep::Continues,
        }
    }

    fn argument(&mut self, c: char, emitter: &mut ToolCallEmitter, out: &mut PieceSink<'_>) {
        if self.has_name {
            emitter.argument(c, out);
        } else {
            self.buffered_arguments.push(c);
        }
    }

    fn name(&mut self, emitter: &mut ToolCallEmitter, out: &mut PieceSink<'_>) -> CallStep {
        let Ok(name) = serde_json::from_str::<String>(&self.token_text) else {
            return CallStep::Invalid;
        };
        let is_known = self.names.as_ref().is_none_or(|names| names.contains(&name));
        if name.is_empty() || !is_known {
            return CallStep::Invalid;
        }
        self.has_name = true;
        emitter.begin(&name, self.from, out);
        let buffered_arguments = std::mem::take(&mut self.buffered_arguments);
        if !buffered_arguments.is_empty() {
            emitter.arguments(&buffered_arguments, out);
        }
        self.go(CallObjectState::Next)
    }

    fn close(&mut self, emitter: &mut ToolCallEmitter, out: &mut PieceSink<'_>) -> CallStep {
        if !self.has_name {
            return CallStep::Invalid;
        }
        if !self.has_arguments {
            emitter.arguments("{}", out);
        }
        emitter.end(out);
        CallStep::Done
    }
}

/// Parser of the arguments of a call whose function name is not part of the JSON. The arguments are one JSON
/// object, which is emitted while it is generated.
#[derive(Debug, Clone, Default)]
pub(super) struct BareArguments {
    json: JsonScanner,
    started: bool,
}

impl BareArguments {
    /// Processes the next character; the call itself has already begun. Whitespace before the object is
    /// dropped.
    pub(super) fn push(
        &mut self,
        c: char,
        emitter: &mut ToolCallEmitter,
        out: &mut PieceSink<'_>,
    ) -> CallStep {
        if !self.started {
            match c {
                '{' => self.started = true,
                _ if is_space(c) => return CallStep::Continues,
                _ => return CallStep::Invalid,
            }
        }
        let scan = self.json.push(c);
        if scan == ScanStep::Invalid {
            return CallStep::Invalid;
        }
        emitter.argument(c, out);
        if scan == ScanStep::Done {
            emitter.end(out);
            return CallStep::Done;
        }
        CallStep::Continues
    }
}
