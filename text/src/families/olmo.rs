//! OLMo 3.
//!
//! Source: the chat template of allenai/Olmo-3-7B-Instruct.

use crate::tool_calls::{CallBlockSyntax, PythonicSyntax, ToolCallSyntax};

impl ToolCallSyntax {
    /// Python calls between `<function_calls>` and `</function_calls>`, one `name(key="value")` per line: OLMo 3.
    pub const OLMO3: Self = Self::new(
        "olmo3",
        &PythonicSyntax::Block(CallBlockSyntax {
            open: "<function_calls>",
            close: "</function_calls>",
            is_fence: false,
        }),
    );
}
