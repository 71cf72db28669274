//! A call as a JSON object: `{"name": …, "arguments": {…}}`, `parameters` being another word.
//!
//! Arguments are passed on as they come once the name is known. The order of the two may be turned
//! round; then the arguments wait for the name.

use super::emitter::Emitter;
use super::json_scan::{JsonScan, Scan, is_space};
use crate::text::pieces::Pieces;
use std::sync::Arc;

/// Bytes of a name as JSON spells it.
const NAME_MAX: usize = 512;
/// Bytes of arguments that come before the name.
const EARLY_MAX: usize = 64 << 10;

/// What a character did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// The call goes on.
    More,
    /// The call ends with this character.
    Done,
    /// This is no call.
    Bad,
}

/// Functions a call may name; `None` = any.
pub(super) type Names = Option<Arc<[String]>>;

#[derive(Debug, Clone)]
enum State {
    Open,
    Key,
    InKey,
    Colon,
    Value,
    Next,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Member {
    Name,
    Arguments,
    /// `id`, `type`: read and dropped.
    Other,
}

/// A call object being read.
#[derive(Debug, Clone)]
pub(super) struct CallObject {
    names: Names,
    state: State,
    member: Member,
    json: JsonScan,
    /// The key or the name, as JSON spells it.
    word: String,
    named: bool,
    /// Arguments seen; those before the name.
    has_arguments: bool,
    early: String,
    from: usize,
}

impl CallObject {
    /// A call whose syntax began at byte `from`.
    pub(super) fn new(names: Names, from: usize) -> Self {
        Self {
            names,
            state: State::Open,
            member: Member::Other,
            json: JsonScan::default(),
            word: String::new(),
            named: false,
            has_arguments: false,
            early: String::new(),
            from,
        }
    }

    /// Takes the next character.
    pub(super) fn push(&mut self, c: char, to: &mut Emitter, out: &mut Pieces<'_>) -> Step {
        match self.state {
            State::InKey => self.key(c),
            State::Value => self.value(c, to, out),
            _ if is_space(c) => Step::More,
            State::Open if c == '{' => self.go(State::Key),
            State::Key if c == '"' => {
                self.word = String::from('"');
                self.json = JsonScan::default();
                self.json.push(c);
                self.go(State::InKey)
            }
            State::Colon if c == ':' => {
                self.json = JsonScan::default();
                self.word.clear();
                self.go(State::Value)
            }
            State::Next if c == ',' => self.go(State::Key),
            State::Next if c == '}' => self.close(to, out),
            _ => Step::Bad,
        }
    }

    fn go(&mut self, state: State) -> Step {
        self.state = state;
        Step::More
    }

    fn key(&mut self, c: char) -> Step {
        self.word.push(c);
        match self.json.push(c) {
            Scan::More if self.word.len() < NAME_MAX => return Step::More,
            Scan::Done => {}
            _ => return Step::Bad,
        }
        self.member = match self.word.as_str() {
            "\"name\"" if !self.named => Member::Name,
            "\"arguments\"" | "\"parameters\"" if !self.has_arguments => Member::Arguments,
            "\"id\"" | "\"type\"" => Member::Other,
            _ => return Step::Bad,
        };
        self.go(State::Colon)
    }

    fn value(&mut self, c: char, to: &mut Emitter, out: &mut Pieces<'_>) -> Step {
        let begins = self.word.is_empty();
        if begins && is_space(c) {
            return Step::More;
        }
        let scan = self.json.push(c);
        if scan == Scan::Bad {
            return Step::Bad;
        }
        match self.member {
            Member::Arguments => {
                if begins && c != '{' {
                    return Step::Bad;
                }
                if begins {
                    self.word.push(c); // The rest goes on its way.
                }
                self.argument(c, to, out);
            }
            Member::Name | Member::Other if self.word.len() >= NAME_MAX => return Step::Bad,
            Member::Name | Member::Other => self.word.push(c),
        }
        match scan {
            Scan::Done if self.member == Member::Name => self.name(to, out),
            Scan::Done => {
                self.has_arguments |= self.member == Member::Arguments;
                self.go(State::Next)
            }
            // A number is neither a name nor arguments: what ended it belongs to the object.
            Scan::Over if self.member == Member::Other => {
                self.state = State::Next;
                self.push(c, to, out)
            }
            Scan::Over | Scan::Bad => Step::Bad,
            Scan::More if self.early.len() > EARLY_MAX => Step::Bad,
            Scan::More => Step::More,
        }
    }

    fn argument(&mut self, c: char, to: &mut Emitter, out: &mut Pieces<'_>) {
        if self.named {
            to.argument(c, out);
        } else {
            self.early.push(c);
        }
    }

    fn name(&mut self, to: &mut Emitter, out: &mut Pieces<'_>) -> Step {
        let Ok(name) = serde_json::from_str::<String>(&self.word) else { return Step::Bad };
        let known = self.names.as_ref().is_none_or(|names| names.contains(&name));
        if name.is_empty() || !known {
            return Step::Bad;
        }
        self.named = true;
        to.begin(&name, self.from, out);
        let early = std::mem::take(&mut self.early);
        if !early.is_empty() {
            to.arguments(&early, out);
        }
        self.go(State::Next)
    }

    fn close(&mut self, to: &mut Emitter, out: &mut Pieces<'_>) -> Step {
        if !self.named {
            return Step::Bad;
        }
        if !self.has_arguments {
            to.arguments("{}", out);
        }
        to.end(out);
        Step::Done
    }
}

/// Arguments that stand alone: one JSON object, passed on as it comes.
#[derive(Debug, Clone, Default)]
pub(super) struct BareArguments {
    json: JsonScan,
    begun: bool,
}

impl BareArguments {
    /// Takes the next character; the call itself has begun. Whitespace in front is dropped.
    pub(super) fn push(&mut self, c: char, to: &mut Emitter, out: &mut Pieces<'_>) -> Step {
        if !self.begun {
            match c {
                '{' => self.begun = true,
                _ if is_space(c) => return Step::More,
                _ => return Step::Bad,
            }
        }
        let scan = self.json.push(c);
        if scan == Scan::Bad {
            return Step::Bad;
        }
        to.argument(c, out);
        if scan == Scan::Done {
            to.end(out);
            return Step::Done;
        }
        Step::More
    }
}
