//! Hermes and the models that write calls as it does.
//!
//! Sources: the chat templates of Qwen/Qwen2.5-7B-Instruct and Qwen/Qwen3-8B.

use crate::tool_calls::{JsonObjectSyntax, ToolCallSyntax};

pub(super) const OPEN: &str = "<tool_call>";
pub(super) const CLOSE: &str = "</tool_call>";

impl ToolCallSyntax {
    /// JSON between `<tool_call>` and `</tool_call>`: Hermes, Qwen2.5, Qwen3.
    pub const HERMES: Self = Self::new(
        "hermes",
        &JsonObjectSyntax { markers: &[OPEN, CLOSE], gap: "\n", between: "\n" },
    );
}
