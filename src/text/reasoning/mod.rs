//! Reasoning in a model's output: the text up to `</think>`.
//!
//! Where a prompt already opens or closes the reasoning, that decides. Else models that always think
//! are inside from the start, and others when they write `<think>` first.

mod reader;
mod splitter;

pub use reader::ReasoningReader;
pub(super) use splitter::{Part, Splitter};

/// The mark that opens reasoning.
pub(super) const OPEN: &str = "<think>";
/// The mark that closes it.
pub(super) const CLOSE: &str = "</think>";

/// A family's habit of reasoning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reasoning {
    /// Thinks if it writes `<think>` first, or if the prompt does.
    Qwen3,
    /// Thinks unless the prompt says it has.
    DeepSeekR1,
    /// Thinks if the prompt says so (`thinking` in `chat_template_kwargs`).
    DeepSeekV3,
}

/// Where an output begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Beginning {
    /// Inside reasoning; an opening mark may still come.
    Inside,
    /// Behind it.
    Behind,
    /// Wherever the opening mark says.
    Open,
}

impl Reasoning {
    /// Names that the command line takes.
    pub const NAMES: &[(&str, Self)] = &[
        ("qwen3", Self::Qwen3),
        ("deepseek_r1", Self::DeepSeekR1),
        ("deepseek_v3", Self::DeepSeekV3),
    ];

    /// Marks that a tokenizer may hold as special tokens.
    pub const MARKS: &[&str] = &[OPEN, CLOSE];

    /// The mark behind which the answer begins.
    pub const END: &str = CLOSE;

    /// Where the output behind a prompt begins; `opening` = the text the template ended it with.
    pub fn beginning(self, opening: &str) -> Beginning {
        let opening = opening.trim_end();
        if opening.ends_with(OPEN) {
            return Beginning::Inside;
        }
        if opening.ends_with(CLOSE) {
            return Beginning::Behind;
        }
        match self {
            Self::Qwen3 | Self::DeepSeekV3 => Beginning::Open,
            Self::DeepSeekR1 => Beginning::Inside,
        }
    }

    /// The reasoning at the end of a message that is continued inside it.
    pub fn begun(message: &str) -> &str {
        message.rfind(OPEN).map_or("", |at| &message[at + OPEN.len()..])
    }

    /// Where an output that continues a message begins.
    pub fn continues(self, message: &str) -> Beginning {
        match (message.rfind(OPEN), message.rfind(CLOSE)) {
            (Some(open), close) if close.is_none_or(|close| close < open) => Beginning::Inside,
            (None, None) if message.trim().is_empty() => self.beginning(""),
            _ => Beginning::Behind,
        }
    }
}
