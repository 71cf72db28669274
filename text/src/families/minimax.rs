//! MiniMax M2.
//!
//! Source: the chat template of MiniMaxAI/MiniMax-M2.

use crate::tool_calls::{TagPair, TagSyntax, ToolCallSyntax};

impl ToolCallSyntax {
    /// `<minimax:tool_call> <invoke name="NAME"> <parameter name="KEY">value</parameter> … </invoke> …
    /// </minimax:tool_call>`: MiniMax M2.
    pub const MINIMAX_M2: Self = Self::new(
        "minimax_m2",
        &TagSyntax {
            wrapper: Some(TagPair { open: "<minimax:tool_call>", close: "</minimax:tool_call>" }),
            call: TagPair { open: "<invoke name=\"", close: "</invoke>" },
            name_ends: &["\">"],
            parameter_open: "<parameter name=\"",
            key_end: "\">",
            value_openings: &[],
            value_ends: &["</parameter>"],
            wraps_values: false,
            wraps_each_call: false,
            line_break: "\n",
            value_gap: "",
            special: &["<minimax:tool_call>", "</minimax:tool_call>"],
        },
    );
}
