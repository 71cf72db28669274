//! Harmony, the output format of gpt-oss: a sequence of messages, each of which has a header. The header
//! names the channel of the message and, for a tool call, its recipient:
//!
//! ```text
//! <|channel|>analysis<|message|>We need the weather.<|end|>
//! <|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Bonn"}<|call|>
//! ```
//!
//! Chat templates end the prompt with `<|start|>assistant`, so the output begins inside a header. Reasoning
//! and tool calls are both messages, so one parser reads both.
//!
//! Sources: the chat template of openai/gpt-oss-20b; `docs/format.md` and the parser of openai/harmony.

mod header;
mod parser;

pub(super) use parser::HarmonyParser;

/// Marker of the harmony format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HarmonyMarker {
    /// Begins a message; the role of its author follows.
    Start,
    /// Precedes the channel of a message.
    Channel,
    /// Precedes the content type of a message.
    Constrain,
    /// Ends the header of a message.
    Message,
    /// Ends a message.
    End,
    /// Ends a tool call and the output.
    Call,
    /// Ends the last message of the output.
    Return,
}

impl HarmonyMarker {
    /// All markers, in the order of their texts in `MARKERS`.
    const ALL: [Self; 7] = [
        Self::Start,
        Self::Channel,
        Self::Constrain,
        Self::Message,
        Self::End,
        Self::Call,
        Self::Return,
    ];

    /// Returns the text of the marker.
    fn text(self) -> &'static str {
        MARKERS[self as usize]
    }
}

/// Texts of all markers, in the order of `HarmonyMarker`. Each may be a special token of the tokenizer.
pub(super) const MARKERS: [&str; 7] =
    ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", END, "<|call|>", "<|return|>"];

/// Marker that ends a message.
pub(super) const END: &str = "<|end|>";
/// Beginning of a message of the model, up to the optional recipient. Chat templates end the prompt with it.
pub(super) const ASSISTANT: &str = "<|start|>assistant";
/// Recipients that are functions begin with this prefix.
pub(super) const FUNCTIONS: &str = "functions.";
