//! DeepSeek: calls between marks of their own. V3 and R1 write a type, a name and fenced JSON; V3.1
//! a name and JSON.
//!
//! Source: the chat templates of deepseek-ai/DeepSeek-V3-0324 and DeepSeek-V3.1.

use super::call_object::{BareArguments, Step};
use super::emitter::Emitter;
use super::json_scan::is_space;
use super::marks::Held;
use super::raw::Raw;
use crate::text::pieces::Pieces;

pub(super) const CALLS_BEGIN: &str = "<｜tool▁calls▁begin｜>";
pub(super) const CALLS_END: &str = "<｜tool▁calls▁end｜>";
pub(super) const CALL_BEGIN: &str = "<｜tool▁call▁begin｜>";
pub(super) const CALL_END: &str = "<｜tool▁call▁end｜>";
pub(super) const SEPARATOR: &str = "<｜tool▁sep｜>";
const FENCE: &str = "```json";
/// Bytes of syntax in front of the arguments.
const HEAD_MAX: usize = 512;

#[derive(Debug, Clone, Default)]
enum State {
    #[default]
    Text,
    /// Type (V3) or name (V3.1), up to the separator.
    Head(String),
    /// V3: the name, up to the fence.
    Name(String),
    Arguments(BareArguments),
}

/// The machine.
#[derive(Debug, Clone)]
pub(super) struct DeepSeek {
    /// V3: arguments stand in a fence, behind a type.
    fenced: bool,
    held: Held,
    state: State,
    /// Between the outer marks.
    inside: bool,
    /// A call has ended; its fence and its closing mark have not come yet.
    closing: bool,
    raw: Raw,
}

impl DeepSeek {
    pub(super) fn new(fenced: bool) -> Self {
        let (held, state, raw) = (Held::default(), State::Text, Raw::default());
        Self { fenced, held, state, inside: false, closing: false, raw }
    }

    pub(super) fn push(&mut self, c: char, to: &mut Emitter, out: &mut Pieces<'_>) {
        let step = match &mut self.state {
            State::Text => return self.text(c, to, out),
            State::Head(_) => self.head(c, to, out),
            State::Name(_) => self.name(c, to, out),
            State::Arguments(arguments) => match arguments.push(c, to, out) {
                Step::Done => {
                    (self.state, self.closing) = (State::Text, true);
                    Step::Done
                }
                step => step,
            },
        };
        if !self.raw.follow(c, step, to) {
            self.give_up(to, out);
            self.text(c, to, out);
        }
    }

    pub(super) fn finish(&mut self, to: &mut Emitter, out: &mut Pieces<'_>) {
        match self.state {
            State::Text => self.held.finish(|c| to.content(c, out)),
            _ => self.give_up(to, out),
        }
        // An outer mark without a call is content.
        self.raw.release(to, out);
    }

    fn text(&mut self, c: char, to: &mut Emitter, out: &mut Pieces<'_>) {
        const MARKS: [&str; 4] = [CALL_BEGIN, CALLS_BEGIN, CALLS_END, CALL_END];
        let (raw, closing) = (&mut self.raw, &mut self.closing);
        let found = self.held.push(c, &MARKS, |c| {
            if *closing && (is_space(c) || c == '`') {
                return;
            }
            *closing = false;
            if is_space(c) && !raw.is_empty() && !raw.is_full() {
                return raw.push(c);
            }
            raw.release(to, out);
            to.content(c, out);
        });
        let Some(found) = found else { return };
        let closing = std::mem::take(&mut self.closing);
        match found {
            0 => {
                self.state = State::Head(String::new());
                self.raw.open(CALL_BEGIN, to, out);
            }
            1 => {
                self.inside = true;
                self.raw.open(CALLS_BEGIN, to, out);
            }
            2 if std::mem::take(&mut self.inside) && self.raw.is_empty() => {}
            3 if closing => {}
            mark => {
                self.raw.release(to, out);
                MARKS[mark].chars().for_each(|c| to.content(c, out));
            }
        }
    }

    fn give_up(&mut self, to: &mut Emitter, out: &mut Pieces<'_>) {
        self.raw.give_up(to, out);
        (self.held, self.state) = (Held::default(), State::Text);
    }

    fn head(&mut self, c: char, to: &mut Emitter, out: &mut Pieces<'_>) -> Step {
        let State::Head(head) = &mut self.state else { return Step::Bad };
        if self.held.push(c, &[SEPARATOR], |c| head.push(c)).is_none() {
            return if head.len() > HEAD_MAX { Step::Bad } else { Step::More };
        }
        let name = std::mem::take(head);
        if self.fenced {
            self.state = State::Name(String::new());
            return Step::More;
        }
        self.begin(&name, to, out)
    }

    fn name(&mut self, c: char, to: &mut Emitter, out: &mut Pieces<'_>) -> Step {
        let State::Name(name) = &mut self.state else { return Step::Bad };
        if self.held.push(c, &[FENCE], |c| name.push(c)).is_none() {
            return if name.len() > HEAD_MAX { Step::Bad } else { Step::More };
        }
        let name = std::mem::take(name);
        self.begin(&name, to, out)
    }

    fn begin(&mut self, name: &str, to: &mut Emitter, out: &mut Pieces<'_>) -> Step {
        let name = name.trim();
        if name.is_empty() || name.contains('\n') {
            return Step::Bad;
        }
        to.begin(name, self.raw.from, out);
        self.state = State::Arguments(BareArguments::default());
        Step::More
    }
}
