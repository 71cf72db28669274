//! Phi-4-mini.
//!
//! Source: the chat template of microsoft/Phi-4-mini-instruct.

use super::hermes;
use crate::tool_calls::{JsonListSyntax, ListMarkers, ToolCallSyntax};

impl ToolCallSyntax {
    /// JSON array after `functools` or `<|tool_call|>`: Phi-4-mini.
    pub const PHI4_MINI: Self = Self::new(
        "phi4_mini_json",
        &JsonListSyntax {
            openers: &["functools", "<|tool_call|>"],
            closers: &["<|/tool_call|>"],
            allows_bare: false,
            label: "",
            written: &[
                ListMarkers { open: "functools", close: "", is_token: false },
                ListMarkers { open: "<|tool_call|>", close: "<|/tool_call|>", is_token: true },
            ],
            special: &["<|tool_call|>", "<|/tool_call|>", hermes::OPEN, hermes::CLOSE],
        },
    );
}
