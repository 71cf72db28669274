//! Reasoning in a model's output: the text that ends with `</think>`.
//!
//! If the prompt ends with `<think>`, the output starts inside the reasoning; if it ends with `</think>`, the
//! output has none. Otherwise the output of models that always reason starts inside the reasoning, and the
//! output of other models contains reasoning if it begins with `<think>`.

mod reader;
mod splitter;

pub use reader::TokenReasoningTracker;
pub(super) use splitter::{OutputSection, ReasoningSplitter};

/// Marker that opens the reasoning.
pub(super) const OPEN_MARKER: &str = "<think>";
/// Marker that closes the reasoning.
pub(super) const CLOSE_MARKER: &str = "</think>";

/// Reasoning format of a model family (`--reasoning-parser`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReasoningFamily {
    /// The output is reasoning if the prompt ends with `<think>`, or if the output begins with `<think>`.
    Qwen3,
    /// The output starts with reasoning unless the prompt ends with `</think>`.
    DeepSeekR1,
    /// The output is reasoning if it begins with `<think>`, or if the prompt ends with `<think>`. Templates
    /// write `<think>` there if `thinking` is true in `chat_template_kwargs`.
    DeepSeekV3,
}

/// Whether an output starts inside its reasoning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReasoningStart {
    /// The output starts inside the reasoning; `<think>` may still follow.
    Inside,
    /// The output has no reasoning, because the prompt closes it.
    After,
    /// The output has reasoning if it begins with `<think>`.
    AtMarker,
}

impl ReasoningFamily {
    /// Command-line names of the reasoning formats, as in vLLM.
    pub const NAMES: &[(&str, Self)] = &[
        ("qwen3", Self::Qwen3),
        ("deepseek_r1", Self::DeepSeekR1),
        ("deepseek_v3", Self::DeepSeekV3),
    ];

    /// Reasoning markers, each of which may be a special token of the tokenizer.
    pub const MARKERS: &[&str] = &[OPEN_MARKER, CLOSE_MARKER];

    /// Marker at the end of the reasoning; the content follows it.
    pub const END_MARKER: &str = CLOSE_MARKER;

    /// Returns the reasoning state at the start of an output; `prompt_tail` is the end of the rendered
    /// prompt.
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

    /// Returns the text after the last `<think>` of a message that is to be continued inside its reasoning.
    pub fn trailing_reasoning(message: &str) -> &str {
        message.rfind(OPEN_MARKER).map_or("", |at| &message[at + OPEN_MARKER.len()..])
    }

    /// Returns the reasoning state at the start of an output that continues the assistant message `message`.
    pub fn start_after_message(self, message: &str) -> ReasoningStart {
        match (message.rfind(OPEN_MARKER), message.rfind(CLOSE_MARKER)) {
            (Some(open), close) if close.is_none_or(|close| close < open) => ReasoningStart::Inside,
            (None, None) if message.trim().is_empty() => self.start_after_prompt(""),
            _ => ReasoningStart::After,
        }
    }
}
