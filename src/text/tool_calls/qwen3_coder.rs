//! Qwen3-Coder: XML-like calls, whose values get the types of the tool's schema.
//!
//! `<tool_call> <function=NAME> <parameter=KEY> value </parameter> … </function> </tool_call>`;
//! the outer mark and `</parameter>` may be missing. Source: the chat template of
//! Qwen/Qwen3-Coder-30B-A3B-Instruct.

use super::call_object::Step;
use super::coercion::{Schemas, Value, quoted};
use super::emitter::Emitter;
use super::hermes::{CLOSE, OPEN};
use super::json_scan::is_space;
use super::marks::Held;
use super::raw::Raw;
use super::tool::Tool;
use crate::text::pieces::Pieces;
use std::sync::Arc;

const FUNCTION: &str = "<function=";
const FUNCTION_END: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const PARAMETER_END: &str = "</parameter>";
/// Bytes of a name.
const NAME_MAX: usize = 256;

#[derive(Debug, Clone, Default)]
enum State {
    #[default]
    Text,
    /// Behind the outer mark.
    Lead,
    Name(String),
    /// Between parameters.
    Between,
    Key(String),
    Value(Value),
}

/// The machine.
#[derive(Debug, Clone)]
pub(super) struct Coder {
    schemas: Schemas,
    held: Held,
    state: State,
    /// The tool being called; `None` = there is none of this name.
    tool: Option<usize>,
    /// A parameter has been written.
    has_parameters: bool,
    /// A call has ended and its outer mark has not been closed.
    closing: bool,
    raw: Raw,
}

impl Coder {
    pub(super) fn new(tools: Arc<[Tool]>) -> Self {
        let (held, state) = (Held::default(), State::Text);
        let (schemas, tool, raw) = (Schemas::new(tools), None, Raw::default());
        let (has_parameters, closing) = (false, false);
        Self { schemas, held, state, tool, has_parameters, closing, raw }
    }

    pub(super) fn push(&mut self, c: char, to: &mut Emitter, out: &mut Pieces<'_>) {
        if matches!(self.state, State::Text) {
            return self.text(c, to, out);
        }
        let step = match self.syntax(c, to, out) {
            false => Step::Bad,
            true if matches!(self.state, State::Text) => Step::Done,
            true => Step::More,
        };
        if !self.raw.follow(c, step, to) {
            self.give_up(to, out);
            self.text(c, to, out);
        }
    }

    pub(super) fn finish(&mut self, to: &mut Emitter, out: &mut Pieces<'_>) {
        if matches!(self.state, State::Text) {
            self.held.finish(|c| to.content(c, out));
        } else {
            self.give_up(to, out);
        }
    }

    fn text(&mut self, c: char, to: &mut Emitter, out: &mut Pieces<'_>) {
        let closing = &mut self.closing;
        let found = self.held.push(c, &[OPEN, FUNCTION, CLOSE], |c| {
            *closing &= c.is_whitespace();
            to.content(c, out);
        });
        match found {
            Some(0) => self.start(OPEN, State::Lead, to, out),
            Some(1) => self.start(FUNCTION, State::Name(String::new()), to, out),
            Some(_) if std::mem::take(&mut self.closing) => {}
            Some(_) => CLOSE.chars().for_each(|c| to.content(c, out)),
            None => {}
        }
    }

    fn start(&mut self, mark: &str, state: State, to: &mut Emitter, out: &mut Pieces<'_>) {
        (self.state, self.closing) = (state, false);
        self.raw.open(mark, to, out);
    }

    fn give_up(&mut self, to: &mut Emitter, out: &mut Pieces<'_>) {
        self.raw.give_up(to, out);
        (self.held, self.state) = (Held::default(), State::Text);
    }

    /// A character inside a call; false if it cannot stand there.
    fn syntax(&mut self, c: char, to: &mut Emitter, out: &mut Pieces<'_>) -> bool {
        match &mut self.state {
            State::Text => false,
            State::Lead => {
                let mut fits = true;
                let found = self.held.push(c, &[FUNCTION], |c| fits &= is_space(c));
                if found.is_some() {
                    self.state = State::Name(String::new());
                }
                fits && self.raw.len() <= NAME_MAX
            }
            State::Name(name) if c == '>' => {
                let name = name.trim();
                if name.is_empty() {
                    return false;
                }
                self.tool = self.schemas.tool(name);
                self.has_parameters = false;
                to.begin(name, self.raw.from, out);
                to.arguments("{", out);
                self.state = State::Between;
                true
            }
            State::Key(key) if c == '>' => {
                let key = std::mem::take(key);
                self.value(key.trim(), to, out);
                true
            }
            State::Name(name) | State::Key(name) => {
                name.push(c);
                name.len() <= NAME_MAX && c != '<' && c != '\n'
            }
            State::Between => self.between(c, to, out),
            State::Value(_) => self.in_value(c, to, out),
        }
    }

    fn between(&mut self, c: char, to: &mut Emitter, out: &mut Pieces<'_>) -> bool {
        let mut fits = true;
        let found = self.held.push(c, &[PARAMETER, FUNCTION_END], |c| fits &= is_space(c));
        match found {
            Some(0) => self.state = State::Key(String::new()),
            Some(_) => self.end(to, out),
            None => {}
        }
        fits
    }

    /// A parameter begins: its key, and what its value will be.
    fn value(&mut self, key: &str, to: &mut Emitter, out: &mut Pieces<'_>) {
        let comma = if std::mem::replace(&mut self.has_parameters, true) { ", " } else { "" };
        to.arguments(comma, out);
        to.arguments(&quoted(key), out);
        to.arguments(": ", out);
        self.state = State::Value(Value::new(self.schemas.types(self.tool, key)));
    }

    fn in_value(&mut self, c: char, to: &mut Emitter, out: &mut Pieces<'_>) -> bool {
        const ENDS: [&str; 4] = [PARAMETER_END, PARAMETER, FUNCTION_END, CLOSE];
        let State::Value(value) = &mut self.state else { return false };
        let mut fits = true;
        let found = self.held.push(c, &ENDS, |c| fits &= value.push(c, |s| to.arguments(s, out)));
        let Some(found) = found else { return fits };
        value.finish(|s| to.arguments(s, out));
        match found {
            0 => self.state = State::Between,
            1 => self.state = State::Key(String::new()),
            2 => self.end(to, out),
            _ => {
                self.end(to, out);
                self.closing = false;
            }
        }
        true
    }

    fn end(&mut self, to: &mut Emitter, out: &mut Pieces<'_>) {
        to.arguments("}", out);
        to.end(out);
        (self.state, self.closing) = (State::Text, true);
    }
}
