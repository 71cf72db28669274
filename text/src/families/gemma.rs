//! Gemma 3, FunctionGemma and Gemma 4.
//!
//! Sources: Google's guides to function calling with Gemma 3; the chat templates of google/functiongemma-270m-it and
//! google/gemma-4-E4B-it.

use crate::reasoning::{ReasoningFamily, ReasoningMarkers};
use crate::tool_calls::{CallBlockSyntax, DelimitedCallSyntax, PythonicSyntax, ToolCallSyntax};

impl ToolCallSyntax {
    /// Python calls in a fence `tool_code`, which Gemma 3 writes where the system prompt asks for it: one
    /// `name(key="value")` or `print(name(key="value"))` per line.
    pub const TOOL_CODE: Self = Self::new(
        "gemma3_tool_code",
        &PythonicSyntax::Block(CallBlockSyntax {
            open: "```tool_code",
            close: "```",
            is_fence: true,
        }),
    );

    /// `call:NAME{key:value}` between `<start_function_call>` and `<end_function_call>`: FunctionGemma.
    pub const FUNCTION_GEMMA: Self = Self::new(
        "functiongemma",
        &DelimitedCallSyntax {
            open: "<start_function_call>",
            close: "<end_function_call>",
            delimiter: "<escape>",
        },
    );

    /// `call:NAME{key:value}` between `<|tool_call>` and `<tool_call|>`: Gemma 4.
    pub const GEMMA4: Self = Self::new(
        "gemma4",
        &DelimitedCallSyntax { open: "<|tool_call>", close: "<tool_call|>", delimiter: "<|\"|>" },
    );
}

impl ReasoningFamily {
    /// Same as `QWEN3`, with the markers `<|channel>thought` with a line break and `<channel|>`.
    pub const GEMMA4: Self = Self::new(
        "gemma4",
        &[ReasoningMarkers { open: "<|channel>thought\n", close: "<channel|>" }],
    )
    .with_marker_parts(&["<|channel>"]);
}
