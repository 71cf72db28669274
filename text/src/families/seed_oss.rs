//! Seed-OSS.
//!
//! Source: the chat template of ByteDance-Seed/Seed-OSS-36B-Instruct.

use super::qwen;
use crate::reasoning::{ReasoningFamily, ReasoningMarkers};
use crate::tool_calls::{TagPair, TagSyntax, ToolCallSyntax};

impl ToolCallSyntax {
    /// Qwen3-Coder's tags inside `<seed:tool_call>`, without line breaks around values: Seed-OSS.
    pub const SEED_OSS: Self = Self::new(
        "seed_oss",
        &TagSyntax {
            wrapper: Some(TagPair { open: "<seed:tool_call>", close: "</seed:tool_call>" }),
            value_ends: &["</parameter>", "<parameter=", "</function>", "</seed:tool_call>"],
            wraps_values: false,
            special: &["<seed:tool_call>", "</seed:tool_call>"],
            ..qwen::CODER_TAGS
        },
    );
}

impl ReasoningFamily {
    /// Same as `QWEN3`, with the markers `<seed:think>` and `</seed:think>`.
    pub const SEED_OSS: Self =
        Self::new("seed_oss", &[ReasoningMarkers { open: "<seed:think>", close: "</seed:think>" }]);
}
