//! Hermes, Qwen2.5, Qwen3: `<tool_call>` JSON object `</tool_call>`, any number of times.
//!
//! Source: the chat templates of Qwen/Qwen2.5-7B-Instruct and Qwen/Qwen3-8B.

use super::call_object::{CallObject, Step};
use super::emitter::Emitter;
use super::marks::Held;
use super::raw::Raw;
use crate::text::pieces::Pieces;

pub(super) const OPEN: &str = "<tool_call>";
pub(super) const CLOSE: &str = "</tool_call>";

/// The machine.
#[derive(Debug, Clone, Default)]
pub(super) struct Hermes {
    held: Held,
    /// A call has ended and its closing mark has not come yet.
    closing: bool,
    call: Option<CallObject>,
    raw: Raw,
}

impl Hermes {
    pub(super) fn push(&mut self, c: char, to: &mut Emitter, out: &mut Pieces<'_>) {
        let Some(call) = &mut self.call else { return self.text(c, to, out) };
        let step = call.push(c, to, out);
        if step == Step::Done {
            (self.call, self.closing) = (None, true);
        }
        if !self.raw.follow(c, step, to) {
            self.give_up(to, out);
            self.text(c, to, out);
        }
    }

    pub(super) fn finish(&mut self, to: &mut Emitter, out: &mut Pieces<'_>) {
        self.held.finish(|c| to.content(c, out));
        self.give_up(to, out);
    }

    /// The call is none: what was read of it is content.
    fn give_up(&mut self, to: &mut Emitter, out: &mut Pieces<'_>) {
        self.call = None;
        self.raw.give_up(to, out);
    }

    fn text(&mut self, c: char, to: &mut Emitter, out: &mut Pieces<'_>) {
        let closing = &mut self.closing;
        let found = self.held.push(c, &[OPEN, CLOSE], |c| {
            *closing &= c.is_whitespace();
            to.content(c, out);
        });
        match found {
            Some(0) => {
                self.raw.open(OPEN, to, out);
                self.call = Some(CallObject::new(None, self.raw.from));
                self.closing = false;
            }
            Some(_) if std::mem::take(&mut self.closing) => {}
            Some(_) => CLOSE.chars().for_each(|c| to.content(c, out)),
            None => {}
        }
    }
}
