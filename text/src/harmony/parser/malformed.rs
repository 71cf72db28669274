//! Malformed headers and calls, whose text becomes content.

use super::super::header::{HarmonyHeader, HarmonyMessageKind};
use super::{HarmonyCallHead, HarmonyParser, HarmonyState};
use crate::output_pieces::OutputPieceWriter;

impl HarmonyParser {
    /// Rejects a malformed header: the text after its valid part is the text of the message. If no part of it
    /// is valid, the whole text is content, or continues the message that it interrupts.
    pub(super) fn reject_header(&mut self, out: &mut OutputPieceWriter<'_>) {
        let replaced = std::mem::replace(&mut self.state, HarmonyState::Content);
        let HarmonyState::Header(header) = replaced else { return };
        self.malformed_header(&header, out);
    }

    fn malformed_header(&mut self, header: &HarmonyHeader, out: &mut OutputPieceWriter<'_>) {
        let interrupted = self.interrupted.take();
        let text = if let Some(start) = header.text_start() {
            let (before, text) = header.text.split_at(start);
            match header.message_kind(self.functions.as_deref()) {
                HarmonyMessageKind::Call(name) => {
                    let (from, text) = (header.from, before.to_owned());
                    self.state = HarmonyState::CallHead(HarmonyCallHead { name, from, text });
                    self.has_answer = true;
                }
                section => self.enter(&section),
            }
            text
        } else {
            let continues = interrupted.is_some();
            self.enter(&interrupted.unwrap_or(HarmonyMessageKind::Answer));
            self.breaks_line &= !continues;
            header.text.as_str()
        };
        text.chars().for_each(|c| self.text(c, out));
    }

    /// Rejects a call without arguments: its text is content.
    pub(super) fn reject_call(&mut self, out: &mut OutputPieceWriter<'_>) {
        let replaced = std::mem::replace(&mut self.state, HarmonyState::Content);
        let HarmonyState::CallHead(head) = replaced else { return };
        self.enter(&HarmonyMessageKind::Answer);
        head.text.chars().for_each(|c| self.content(c, out));
    }
}
