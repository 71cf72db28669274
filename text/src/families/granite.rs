//! Granite 3 and Granite 20B. Granite 4 writes calls as Hermes does.
//!
//! Sources: the chat templates of ibm-granite/granite-3.1-8b-instruct and granite-20b-functioncalling.

use super::hermes;
use crate::reasoning::{ReasoningFamily, ReasoningMarkers};
use crate::tool_calls::{JsonListSyntax, JsonObjectSyntax, ListMarkers, ToolCallSyntax};

impl ToolCallSyntax {
    /// JSON array after `<|tool_call|>` or `<tool_call>`: Granite 3.
    pub const GRANITE: Self = Self::new(
        "granite",
        &JsonListSyntax {
            openers: &["<|tool_call|>", hermes::OPEN],
            closers: &[hermes::CLOSE],
            allows_bare: true,
            label: "",
            written: &[
                ListMarkers { open: "<|tool_call|>", close: "", is_token: true },
                ListMarkers { open: hermes::OPEN, close: "", is_token: false },
            ],
            special: &["<|tool_call|>", "<|/tool_call|>", hermes::OPEN, hermes::CLOSE],
        },
    );

    /// JSON after `<function_call>`: Granite 20B.
    pub const GRANITE_20B: Self = Self::new(
        "granite-20b-fc",
        &JsonObjectSyntax { markers: &["<function_call>"], gap: " ", between: "" },
    );
}

impl ReasoningFamily {
    /// Same as `QWEN3`, with sentences as markers: `Here is my thought process:` and `Here is my response:`,
    /// or the same sentences with `Here's`.
    pub const GRANITE: Self = Self::new(
        "granite",
        &[
            ReasoningMarkers { open: "Here is my thought process:", close: "Here is my response:" },
            ReasoningMarkers { open: "Here's my thought process:", close: "Here's my response:" },
        ],
    );
}
