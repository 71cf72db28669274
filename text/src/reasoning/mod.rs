//! Reasoning in a model's output: the text up to `</think>`.
//!
//! If the prompt opens or closes the reasoning, that decides. Otherwise the output of models that always
//! reason starts inside the reasoning, and that of other models if it begins with `<think>`.

mod reader;
mod splitter;

pub use reader::ReasoningReader;
pub(super) use splitter::{OutputSection, ReasoningSplitter};

/// Marker that opens the reasoning.
pub(super) const OPEN_MARKER: &str = "<think>";
/// Marker that closes the reasoning.
pub(super) const CLOSE_MARKER: &str = "</think>";

/// Reasoning format of a model family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReasoningFamily {
    /// Reasons if the prompt ends with `<think>`, or if the output begins with it.
    Qwen3,
    /// Reasons unless the prompt closes the reasoning.
    DeepSeekR1,
    /// Reasons if the prompt opens the reasoning (`thinking` in `chat_template_kwargs`).
    DeepSeekV3,
}

/// Reasoning state at the start of an output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReasoningStart {
    /// Inside the reasoning; an opening marker may still follow.
    Inside,
    /// After the reasoning.
    After,
    /// Determined by the opening marker.
    AtMarker,
}

impl ReasoningFamily {
    /// Names of the formats on the command line.
    pub const NAMES: &[(&str, Self)] = &[
        ("qwen3", Self::Qwen3),
        ("deepseek_r1", Self::DeepSeekR1),
        ("deepseek_v3", Self::DeepSeekV3),
    ];

    /// Markers that a tokenizer may have as special tokens.
    pub const MARKERS: &[&str] = &[OPEN_MARKER, CLOSE_MARKER];

    /// Marker after which the content begins.
    pub const END_MARKER: &str = CLOSE_MARKER;

    /// Returns the reasoning state of an output after a prompt; `prompt_tail`: the end of the rendered text.
    pub fn start_after_prompt(self, prompt_tail: &str) -> ReasoningStart {
        let prompt_tail = prompt_tail.trim_end();
        if prompt_tail.ends_with(OPEN_MARKER) {
            return ReasoningStart::Inside;
        }
        if prompt_tail.ends_with(CLOSE_MARKER) {
            return ReasoningStart::After;
        }
        match self {
            Self::Qwen3 | Self::DeepSeekV3 => ReasoningStart::AtMarker,
            Self::DeepSeekR1 => ReasoningStart::Inside,
        }
    }

    /// Returns the reasoning at the end of a message that is continued inside the reasoning.
    pub fn trailing_reasoning(message: &str) -> &str {
        message.rfind(OPEN_MARKER).map_or("", |at| &message[at + OPEN_MARKER.len()..])
    }

    /// Returns the reasoning state of an output that continues a message.
    pub fn start_after_message(self, message: &str) -> ReasoningStart {
        match (message.rfind(OPEN_MARKER), message.rfind(CLOSE_MARKER)) {
            (Some(open), close) if close.is_none_or(|close| close < open) => ReasoningStart::Inside,
            (None, None) if message.trim().is_empty() => self.start_after_prompt(""),
            _ => ReasoningStart::After,
        }
    }
}
