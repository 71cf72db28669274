//! Kimi K2.
//!
//! Source: the chat template of moonshotai/Kimi-K2-Instruct.

use crate::tool_calls::{CallHeaderFormat, JsonSectionSyntax, ToolCallIdFormat, ToolCallSyntax};

impl ToolCallSyntax {
    /// JSON after `functions.NAME:INDEX`, between special tokens: Kimi K2.
    pub const KIMI_K2: Self = Self::new(
        "kimi_k2",
        &JsonSectionSyntax {
            section_open: "<|tool_calls_section_begin|>",
            section_close: "<|tool_calls_section_end|>",
            call_open: "<|tool_call_begin|>",
            call_close: "<|tool_call_end|>",
            separator: "<|tool_call_argument_begin|>",
            head: CallHeaderFormat::Index,
            between: "",
        },
    )
    .with_ids(ToolCallIdFormat::Function);
}
