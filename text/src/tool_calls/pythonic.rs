//! Parser of tool calls in Python's syntax, of known functions only: a list `[name(key="value"), …]` at the beginning of
//! the output, or one call per line in a block between two markers.

use super::call_emitter::ToolCallEmitter;
use super::call_object::{AllowedFunctionNames, CallParseStatus};
use super::json_scanner::is_space;
use super::marker_scanner::MarkerScanner;
use super::python_value::{PythonScanStatus, PythonValueParser};
use super::pythonic_syntax::{CLOSE, CallBlockSyntax, OPEN};
use super::schema_types::quoted;
use super::syntax_kind::CallParser;
use super::tagged_calls::NAME_MAX;
use super::tool_definition::is_tool_name_part;
use super::unparsed_syntax::UnparsedCallText;
use crate::output_pieces::OutputPieceWriter;

/// Function that model-written code may apply to the result of a call.
const PRINT: &str = "print";

#[derive(Debug, Clone)]
enum PythonicState {
    /// The output is only whitespace so far.
    Start,
    /// After an opening fence: whitespace must follow.
    Fence,
    /// After `OPEN`: the list must follow. In a block, before the first call: a call must follow.
    Lead,
    /// Before a call.
    Item,
    Name(String),
    /// Before an argument; the call may also end here.
    Argument,
    Key(String),
    /// After a key: `=` must follow.
    Equals,
    Value(Box<PythonValueParser>),
    /// After a value.
    NextArgument,
    /// After a call.
    NextCall,
    /// Within the closing marker of a block; the number of its characters read so far.
    Closing(usize),
    Text,
}

/// Parser of tool calls in Python's syntax.
#[derive(Debug, Clone)]
pub(super) struct PythonicToolParser {
    names: AllowedFunctionNames,
    /// Markers around calls that are written one per line; `None` = calls are in a list.
    block: Option<&'static CallBlockSyntax>,
    state: PythonicState,
    scanner: MarkerScanner,
    /// Whether an argument of the call has been emitted.
    has_arguments: bool,
    /// Whether the list is complete, but `CLOSE` has not been read.
    closing: bool,
    /// Whether the call is the argument of a `print(…)` that has not been closed yet.
    is_printed: bool,
    unparsed: UnparsedCallText,
}

impl PythonicToolParser {
    /// Creates a parser of calls in a list, or, with `block`, of calls written one per line. `names` are the
    /// names of the request's tools.
    pub(super) fn new(
        names: AllowedFunctionNames,
        block: Option<&'static CallBlockSyntax>,
    ) -> Self {
        Self {
            names,
            block,
            state: if block.is_some() { PythonicState::Text } else { PythonicState::Start },
            scanner: MarkerScanner::default(),
            has_arguments: false,
            closing: false,
            is_printed: false,
            unparsed: UnparsedCallText::default(),
        }
    }
}

impl CallParser for PythonicToolParser {
    fn push(&mut self, c: char, emitter: &mut ToolCallEmitter, out: &mut OutputPieceWriter<'_>) {
        if matches!(self.state, PythonicState::Start | PythonicState::Text) {
            return self.text(c, emitter, out);
        }
        let step = self.syntax(c, emitter, out);
        if step == CallParseStatus::Done {
            self.unparsed.from = out.bytes_read;
        }
        if !self.unparsed.apply_step(c, step, emitter) {
            self.reject_call(out.start_of(c), emitter, out);
            self.text(c, emitter, out);
        }
    }

    fn finish(&mut self, emitter: &mut ToolCallEmitter, out: &mut OutputPieceWriter<'_>) {
        match self.state {
            PythonicState::Start | PythonicState::Text => {
                self.scanner.finish(|c| emitter.content(c, out));
            }
            PythonicState::NextCall | PythonicState::Closing(_) => {}
            _ => self.reject_call(out.bytes_read, emitter, out),
        }
    }

    fn boxed_clone(&self) -> Box<dyn CallParser> {
        Box::new(self.clone())
    }
}

impl PythonicToolParser {
    fn text(&mut self, c: char, emitter: &mut ToolCallEmitter, out: &mut OutputPieceWriter<'_>) {
        if matches!(self.state, PythonicState::Start) && self.scanner.is_empty() {
            if c == '[' {
                self.unparsed.open("[", emitter, out);
                self.state = PythonicState::Item;
                return;
            }
            if !is_space(c) {
                self.state = PythonicState::Text;
            }
        }
        if let Some(CallBlockSyntax { open, is_fence, .. }) = self.block {
            if self.scanner.push(c, &[open], |c| emitter.content(c, out)).is_some() {
                self.unparsed.open(open, emitter, out);
                self.state = if *is_fence { PythonicState::Fence } else { PythonicState::Lead };
                self.is_printed = false;
            }
            return;
        }
        match self.scanner.push(c, &[OPEN, CLOSE], |c| emitter.content(c, out)) {
            Some(0) => {
                self.unparsed.open(OPEN, emitter, out);
                (self.state, self.closing) = (PythonicState::Lead, false);
            }
            Some(_) if std::mem::take(&mut self.closing) && emitter.is_after_call() => {
                emitter.drop_space();
            }
            Some(_) => CLOSE.chars().for_each(|c| emitter.content(c, out)),
            None => {}
        }
    }

    fn reject_call(
        &mut self,
        to: usize,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) {
        self.unparsed.reject_call(to, emitter, out);
        self.state = PythonicState::Text;
    }

    /// Parses a character inside the list.
    fn syntax(
        &mut self,
        c: char,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) -> CallParseStatus {
        match &mut self.state {
            PythonicState::Value(_) => self.value(c, emitter, out),
            PythonicState::Name(name) if is_tool_name_part(c) => push_name(name, c),
            PythonicState::Key(name) if is_name_part(c) => push_name(name, c),
            PythonicState::Name(name) if c == '(' => {
                let name = std::mem::take(name);
                self.begin(&name, emitter, out)
            }
            PythonicState::Key(key) => {
                let comma =
                    if std::mem::replace(&mut self.has_arguments, true) { ", " } else { "" };
                let key = format!("{comma}{}: ", quoted(key));
                emitter.arguments(&key, out);
                self.state = PythonicState::Equals;
                self.syntax(c, emitter, out)
            }
            PythonicState::Name(_) => CallParseStatus::Invalid,
            PythonicState::Fence if is_space(c) => self.go(PythonicState::Lead),
            PythonicState::Closing(_) => self.closing_marker(c),
            _ if is_space(c) => CallParseStatus::Continues,
            PythonicState::Lead if self.block.is_some() && is_tool_name_part(c) => {
                self.go(PythonicState::Name(String::from(c)))
            }
            PythonicState::Lead if self.block.is_none() && c == '[' => self.go(PythonicState::Item),
            PythonicState::Item if is_tool_name_part(c) => {
                self.go(PythonicState::Name(String::from(c)))
            }
            PythonicState::Argument | PythonicState::NextArgument if c == ')' => {
                emitter.arguments("}", out);
                emitter.end(out);
                self.state = PythonicState::NextCall;
                CallParseStatus::Done
            }
            PythonicState::Argument if is_name_part(c) => {
                self.go(PythonicState::Key(String::from(c)))
            }
            PythonicState::Equals if c == '=' => self.go(PythonicState::Value(Box::default())),
            PythonicState::NextArgument if c == ',' => self.go(PythonicState::Argument),
            PythonicState::NextCall if self.block.is_some() => self.next_line(c),
            PythonicState::NextCall if c == ',' => self.go(PythonicState::Item),
            PythonicState::NextCall if c == ']' => {
                (self.state, self.closing) = (PythonicState::Text, true);
                CallParseStatus::Done
            }
            _ => CallParseStatus::Invalid,
        }
    }

    /// Parses a character after a call that is written on its own line.
    fn next_line(&mut self, c: char) -> CallParseStatus {
        match c {
            ')' if std::mem::take(&mut self.is_printed) => CallParseStatus::Continues,
            _ if self.is_printed => CallParseStatus::Invalid,
            _ if self.close_marker().starts_with(c) => self.go(PythonicState::Closing(1)),
            c if is_tool_name_part(c) => self.go(PythonicState::Name(String::from(c))),
            _ => CallParseStatus::Invalid,
        }
    }

    /// Returns the closing marker of the block; empty if calls are in a list.
    fn close_marker(&self) -> &'static str {
        self.block.map_or("", |block| block.close)
    }

    fn closing_marker(&mut self, c: char) -> CallParseStatus {
        let close = self.close_marker();
        match &mut self.state {
            PythonicState::Closing(count) if close[*count..].starts_with(c) => {
                *count += 1;
                if *count < close.len() {
                    return CallParseStatus::Continues;
                }
                self.state = PythonicState::Text;
                CallParseStatus::Done
            }
            _ => CallParseStatus::Invalid,
        }
    }

    fn value(
        &mut self,
        c: char,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) -> CallParseStatus {
        let PythonicState::Value(value) = &mut self.state else { return CallParseStatus::Invalid };
        match value.push(c, &mut |part| emitter.arguments(part, out)) {
            PythonScanStatus::Continues => CallParseStatus::Continues,
            PythonScanStatus::Done => self.go(PythonicState::NextArgument),
            PythonScanStatus::EndedBefore => {
                self.state = PythonicState::NextArgument;
                self.syntax(c, emitter, out)
            }
            PythonScanStatus::Invalid => CallParseStatus::Invalid,
        }
    }

    fn go(&mut self, state: PythonicState) -> CallParseStatus {
        self.state = state;
        CallParseStatus::Continues
    }

    fn begin(
        &mut self,
        name: &str,
        emitter: &mut ToolCallEmitter,
        out: &mut OutputPieceWriter<'_>,
    ) -> CallParseStatus {
        if self.names.as_ref().is_some_and(|names| !names.iter().any(|known| known == name)) {
            let may_print = self.block.is_some_and(|block| block.is_fence);
            if may_print && name == PRINT && !std::mem::replace(&mut self.is_printed, true) {
                return self.go(PythonicState::Lead);
            }
            return CallParseStatus::Invalid;
        }
        self.has_arguments = false;
        emitter.begin(name, self.unparsed.from, out);
        emitter.arguments("{", out);
        self.go(PythonicState::Argument)
    }
}

/// Appends a character to a name, whose length is limited.
fn push_name(name: &mut String, c: char) -> CallParseStatus {
    name.push(c);
    if name.len() > NAME_MAX { CallParseStatus::Invalid } else { CallParseStatus::Continues }
}

/// Whether `c` may be part of a key.
fn is_name_part(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.')
}
