//! Reasoning in a model's output: the text up to `</think>`.
//!
//! Where a prompt already opens or closes the reasoning, that decides. Else models that always think
//! are inside from the start, and others when they write `<think>` first.

mod reader;
mod splitter;

pub use reader::ReasoningReader;
pub(super) use splitter::{OutputSection, ReasoningSplitter};

/// The mark that opens reasoning.
pub(super) const OPEN_MARKER: &str = "<think>";
/// The mark that closes it.
pub(super) const CLOSE_MARKER: &str = "</think>";

/// A family's habit of reasoning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReasoningFamily {
    /// Thinks if it writes `<think>` first, or if the prompt does.
    Qwen3,
    /// Thinks unless the prompt says it has.
    DeepSeekR1,
    /// Thinks if the prompt says so (`thinking` in `chat_template_kwargs`).
    DeepSeekV3,
}

/// Where an output begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReasoningStart {
    /// Inside reasoning; an opening mark may still come.
    Inside,
    /// Behind it.
    After,
    /// Wherever the opening mark says.
    AtMarker,
}

impl ReasoningFamily {
    /// Names that the command line takes.
    pub const NAMES: &[(&str, Self)] = &[
        ("qwen3", Self::Qwen3),
        ("deepseek_r1", Self::DeepSeekR1),
        ("deepseek_v3", Self::DeepSeekV3),
    ];

    /// Marks that a tokenizer may hold as special tokens.
    pub const MARKERS: &[&str] = &[OPEN_MARKER, CLOSE_MARKER];

    /// The mark behind which the answer begins.
    pub const END_MARKER: &str = CLOSE_MARKER;

    /// Where the output behind a prompt begins; `opening` = the text the template ended it with.
    pub fn start_after_prompt(self, opening: &str) -> ReasoningStart {
        let opening = opening.trim_end();
        if opening.ends_with(OPEN_MARKER) {
            return ReasoningStart::Inside;
        }
        if opening.ends_with(CLOSE_MARKER) {
            return ReasoningStart::After;
        }
        match self {
            Self::Qwen3 | Self::DeepSeekV3 => ReasoningStart::AtMarker,
            Self::DeepSeekR1 => ReasoningStart::Inside,
        }
    }

    /// The reasoning at the end of a message that is continued inside it.
    pub fn trailing_reasoning(message: &str) -> &str {
        message.rfind(OPEN_MARKER).map_or("", |at| &message[at + OPEN_MARKER.len()..])
    }

    /// Where an output that continues a message begins.
    pub fn start_after_message(self, message: &str) -> ReasoningStart {
        match (message.rfind(OPEN_MARKER), message.rfind(CLOSE_MARKER)) {
            (Some(open), close) if close.is_none_or(|close| close < open) => ReasoningStart::Inside,
            (None, None) if message.trim().is_empty() => self.start_after_prompt(""),
            _ => ReasoningStart::After,
        }
    }
}
