//! xLAM.
//!
//! Source: the chat template of Salesforce/Llama-xLAM-2-8b-fc-r.

use super::hermes;
use crate::tool_calls::{JsonListSyntax, ToolCallSyntax};

impl ToolCallSyntax {
    /// JSON array, the whole output or in a code fence: xLAM.
    pub const XLAM: Self = Self::new(
        "xlam",
        &JsonListSyntax {
            openers: &["```", hermes::OPEN],
            closers: &["```", hermes::CLOSE],
            allows_bare: true,
            label: "json",
            written: &[],
            special: &["<|tool_call|>", "<|/tool_call|>", hermes::OPEN, hermes::CLOSE],
        },
    );
}
