//! Parser of a JSON array of call objects: `[{"name": …, "arguments": {…}}, …]`.

use super::call_emitter::ToolCallEmitter;
use super::call_object::{AllowedFunctionNames, CallObjectParser, CallParseStatus};
use super::json_scanner::is_space;
use crate::output_pieces::OutputPieceWriter;

#[derive(Debug, Clone)]
enum CallListState {
    Start,
    /// Before a call object.
    Item,
    Object(Box<CallObjectParser>),
    /// After a call object.
    Next,
    End,
}

/// Parser of one array of call objects.
#[derive(Debug, Clone)]
pub(super) struct CallListParser {
    names: AllowedFunctionNames,
    state: CallListState,
    /// Byte offset in the output at which the next call begins.
    from: usize,
}

impl CallListParser {
    /// Creates a parser of an array whose syntax begins at byte `from` of the output; only the functions
    /// `names` may be called.
    pub(super) fn new(names: AllowedFunctionNames, from: usize) -> Self {
        Self { names, state: CallListState::Start, from }
    }

    /// Whether the array is complete.
    pub(super) fn is_complete(&self) -> bool {
        matches!(self.state, CallListState::End)
    }

    /// Whether the last character completed a call object, or is whitespace after a call object.
    pub(super) fn is_after_object(&self) -> bool {
        matches!(self.state, CallListState::Next)
    }

    /// Processes the next character. `Done` is returned both at the end of a call object and at the end of
    /// the array.
    pub(super) fn push(
        &mut self,
        c: char,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) -> CallParseStatus {
        match &mut self.state {
            CallListState::Object(object) => {
                let step = object.push(c, emitter, out);
                if step == CallParseStatus::Done {
                    (self.state, self.from) = (CallListState::Next, out.bytes_read);
                }
                step
            }
            CallListState::End => CallParseStatus::Invalid,
            _ if is_space(c) => CallParseStatus::Continues,
            CallListState::Start if c == '[' => self.go(CallListState::Item),
            CallListState::Item if c == '{' => self.begin_object(c, emitter, out),
            CallListState::Next if c == ',' => self.go(CallListState::Item),
            CallListState::Next if c == ']' => {
                self.state = CallListState::End;
                CallParseStatus::Done
            }
            CallListState::Start | CallListState::Item | CallListState::Next => {
                CallParseStatus::Invalid
            }
        }
    }

    /// Processes the opening bracket `c` of a call object.
    fn begin_object(
        &mut self,
        c: char,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) -> CallParseStatus {
        let mut object = Box::new(CallObjectParser::new(self.names.clone(), self.from));
        object.push(c, emitter, out);
        self.go(CallListState::Object(object))
    }

    fn go(&mut self, state: CallListState) -> CallParseStatus {
        self.state = state;
        CallParseStatus::Continues
    }
}
