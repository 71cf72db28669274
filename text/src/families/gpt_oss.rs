//! gpt-oss, whose output is in the harmony format.

use crate::harmony::MARKERS;
use crate::reasoning::{ReasoningFamily, ReasoningMarkers};
use crate::tool_calls::{HarmonyCallSyntax, ToolCallSyntax};

impl ToolCallSyntax {
    /// Messages to a function, whose text is JSON: gpt-oss. It needs `ReasoningFamily::HARMONY`.
    pub const HARMONY: Self = Self::new("harmony", &HarmonyCallSyntax);
}

impl ReasoningFamily {
    /// The messages in the channel `analysis` (gpt-oss). Such messages may also follow content.
    pub const HARMONY: Self = Self::new(
        "harmony",
        &[ReasoningMarkers {
            open: "<|channel|>analysis<|message|>",
            close: "<|end|><|start|>assistant",
        }],
    )
    .with_marker_parts(&MARKERS)
    .with_answer_opening("<|end|><|start|>assistant<|channel|>final<|message|>");
}
