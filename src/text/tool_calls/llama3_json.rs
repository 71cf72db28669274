//! Llama 3.1 and later: the whole output is a JSON object, or several with semicolons between,
//! perhaps behind `<|python_tag|>`. It has no mark of its own, so only known functions are calls.
//!
//! Source: the chat templates of meta-llama/Llama-3.1-8B-Instruct and Llama-3.2-1B-Instruct.

use super::call_object::{CallObject, Names, Step};
use super::emitter::Emitter;
use super::json_scan::is_space;
use super::marks::Held;
use super::raw::Raw;
use crate::text::pieces::Pieces;

pub(super) const TAG: &str = "<|python_tag|>";

#[derive(Debug, Clone)]
enum State {
    /// Nothing but whitespace so far; the tag may have come.
    Start {
        tagged: bool,
    },
    Call(Box<CallObject>),
    /// Behind a call: a semicolon and another one, or text.
    Between,
    Text,
}

/// The machine.
#[derive(Debug, Clone)]
pub(super) struct Llama {
    names: Names,
    state: State,
    held: Held,
    raw: Raw,
}

impl Llama {
    pub(super) fn new(names: Names) -> Self {
        let state = State::Start { tagged: false };
        Self { names, state, held: Held::default(), raw: Raw::default() }
    }

    pub(super) fn push(&mut self, c: char, to: &mut Emitter, out: &mut Pieces<'_>) {
        match &mut self.state {
            State::Text => to.content(c, out),
            State::Call(call) => {
                let step = call.push(c, to, out);
                if step == Step::Done {
                    self.state = State::Between;
                }
                if !self.raw.follow(c, step, to) {
                    self.give_up(Some(c), to, out);
                }
            }
            State::Start { .. } | State::Between if c == '{' && self.held.is_empty() => {
                self.raw.open("{", to, out);
                let mut call = Box::new(CallObject::new(self.names.clone(), self.raw.from));
                call.push(c, to, out);
                self.state = State::Call(call);
            }
            State::Start { tagged: false } => self.start(c, to, out),
            State::Between if c == ';' => self.hold(c, to, out),
            State::Start { tagged: true } | State::Between if is_space(c) => self.hold(c, to, out),
            State::Start { tagged: true } | State::Between => self.give_up(Some(c), to, out),
        }
    }

    pub(super) fn finish(&mut self, to: &mut Emitter, out: &mut Pieces<'_>) {
        let raw = &mut self.raw;
        self.held.finish(|c| raw.push(c));
        if !matches!(self.state, State::Between) {
            self.give_up(None, to, out);
        }
    }

    /// A character in front of a call, or between two.
    fn hold(&mut self, c: char, to: &mut Emitter, out: &mut Pieces<'_>) {
        self.raw.push(c);
        if self.raw.is_full() {
            self.give_up(None, to, out);
        }
    }

    fn start(&mut self, c: char, to: &mut Emitter, out: &mut Pieces<'_>) {
        let (raw, mut text) = (&mut self.raw, false);
        let found = self.held.push(c, &[TAG], |c| {
            text |= !is_space(c);
            raw.push(c);
        });
        if found.is_some() {
            TAG.chars().for_each(|c| raw.push(c));
            self.state = State::Start { tagged: true };
        } else if text || raw.is_full() {
            self.give_up(None, to, out);
        }
    }

    /// The rest of the output is text, from what is held on.
    fn give_up(&mut self, c: Option<char>, to: &mut Emitter, out: &mut Pieces<'_>) {
        let raw = &mut self.raw;
        self.held.finish(|c| raw.push(c));
        raw.give_up(to, out);
        if let Some(c) = c {
            to.content(c, out);
        }
        self.state = State::Text;
    }
}
