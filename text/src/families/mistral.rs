//! Mistral and Magistral.
//!
//! Sources: the chat templates of mistralai/Mistral-7B-Instruct-v0.3 and Mistral-Small-3.2.

use crate::reasoning::{ReasoningFamily, ReasoningMarkers};
use crate::tool_calls::{MistralSyntax, ToolCallIdFormat, ToolCallSyntax};

impl ToolCallSyntax {
    /// JSON after `[TOOL_CALLS]`: Mistral.
    pub const MISTRAL: Self = Self::new("mistral", &MistralSyntax).with_ids(ToolCallIdFormat::Nine);
}

impl ReasoningFamily {
    /// Same as `QWEN3`, with the markers `[THINK]` and `[/THINK]`.
    pub const MISTRAL: Self =
        Self::new("mistral", &[ReasoningMarkers { open: "[THINK]", close: "[/THINK]" }]);
}
