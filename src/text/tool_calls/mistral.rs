//! Mistral: `[TOOL_CALLS]` and an array of call objects, or (tokenizers from v11 on)
//! `[TOOL_CALLS]name{…}` for each call, with `[CALL_ID]…` and `[ARGS]` in some versions.
//!
//! Source: the chat templates of mistralai/Mistral-7B-Instruct-v0.3 and Mistral-Small-3.2.

use super::call_object::{BareArguments, CallObject, Step};
use super::emitter::Emitter;
use super::json_scan::is_space;
use super::marks::Held;
use super::raw::Raw;
use crate::text::pieces::Pieces;

pub(super) const CALLS: &str = "[TOOL_CALLS]";
pub(super) const CALL_ID: &str = "[CALL_ID]";
pub(super) const ARGS: &str = "[ARGS]";
/// Bytes of syntax in front of bare arguments.
const HEAD_MAX: usize = 512;

#[derive(Debug, Clone, Default)]
enum State {
    #[default]
    Text,
    /// Behind the mark.
    Lead,
    /// Inside the array, before an object.
    Item,
    Object(Box<CallObject>),
    /// Inside the array, behind an object.
    Next,
    Name(String),
    /// An id follows the name; it is dropped.
    Id(String),
    Arguments(BareArguments),
}

/// The machine.
#[derive(Debug, Clone, Default)]
pub(super) struct Mistral {
    held: Held,
    state: State,
    raw: Raw,
}

impl Mistral {
    pub(super) fn push(&mut self, c: char, to: &mut Emitter, out: &mut Pieces<'_>) {
        if matches!(self.state, State::Text) {
            return self.text(c, to, out);
        }
        let step = self.syntax(c, to, out);
        if !self.raw.follow(c, step, to) {
            self.give_up(to, out);
            self.text(c, to, out);
        }
    }

    pub(super) fn finish(&mut self, to: &mut Emitter, out: &mut Pieces<'_>) {
        match self.state {
            State::Text => self.held.finish(|c| to.content(c, out)),
            State::Next => {}
            _ => self.give_up(to, out),
        }
    }

    fn text(&mut self, c: char, to: &mut Emitter, out: &mut Pieces<'_>) {
        if self.held.push(c, &[CALLS], |c| to.content(c, out)).is_some() {
            self.state = State::Lead;
            self.raw.open(CALLS, to, out);
        }
    }

    fn give_up(&mut self, to: &mut Emitter, out: &mut Pieces<'_>) {
        self.raw.give_up(to, out);
        (self.held, self.state) = (Held::default(), State::Text);
    }

    /// A character behind the mark.
    fn syntax(&mut self, c: char, to: &mut Emitter, out: &mut Pieces<'_>) -> Step {
        match &mut self.state {
            State::Lead | State::Item | State::Next if is_space(c) => Step::More,
            State::Lead if c == '[' => self.go(State::Item),
            State::Lead => {
                self.state = State::Name(String::new());
                self.syntax(c, to, out)
            }
            State::Item if c == '{' => {
                let mut object = Box::new(CallObject::new(None, self.raw.from));
                object.push(c, to, out);
                self.go(State::Object(object))
            }
            State::Next if c == ',' => self.go(State::Item),
            State::Next if c == ']' => {
                self.state = State::Text;
                Step::Done
            }
            State::Object(object) => match object.push(c, to, out) {
                Step::Done => {
                    (self.state, self.raw.from) = (State::Next, out.at);
                    Step::Done
                }
                step => step,
            },
            State::Arguments(arguments) => match arguments.push(c, to, out) {
                Step::Done => {
                    self.state = State::Text;
                    Step::Done
                }
                step => step,
            },
            State::Name(_) | State::Id(_) => self.head(c, to, out),
            State::Text | State::Item | State::Next => Step::Bad,
        }
    }

    fn go(&mut self, state: State) -> Step {
        self.state = state;
        Step::More
    }

    /// A name, perhaps an id, up to the arguments.
    fn head(&mut self, c: char, to: &mut Emitter, out: &mut Pieces<'_>) -> Step {
        let (name, in_name) = match &mut self.state {
            State::Name(name) => (name, true),
            State::Id(name) => (name, false),
            _ => return Step::Bad,
        };
        if self.raw.len() > HEAD_MAX {
            return Step::Bad;
        }
        if c == '{' && self.held.is_empty() && in_name && !name.is_empty() {
            to.begin(name, self.raw.from, out);
            let mut arguments = BareArguments::default();
            arguments.push(c, to, out);
            return self.go(State::Arguments(arguments));
        }
        let mut fits = true;
        let found = self.held.push(c, &[CALL_ID, ARGS], |c| {
            fits &= c.is_ascii_alphanumeric() || "_-.".contains(c);
            if in_name {
                name.push(c);
            }
        });
        match found {
            _ if !fits => Step::Bad,
            None => Step::More,
            Some(_) if name.is_empty() => Step::Bad,
            Some(0) if in_name => {
                let name = std::mem::take(name);
                self.go(State::Id(name))
            }
            Some(0) => Step::Bad,
            Some(_) => {
                to.begin(name, self.raw.from, out);
                self.go(State::Arguments(BareArguments::default()))
            }
        }
    }
}
