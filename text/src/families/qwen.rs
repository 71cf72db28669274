//! Qwen3 and Qwen3-Coder.
//!
//! Source: the chat template of Qwen/Qwen3-Coder-30B-A3B-Instruct.

use super::hermes;
use crate::reasoning::{ReasoningFamily, ReasoningMarkers};
use crate::tool_calls::{TagPair, TagSyntax, ToolCallSyntax};

pub(super) const THINK_TAGS: &[ReasoningMarkers] =
    &[ReasoningMarkers { open: "<think>", close: "</think>" }];

/// `<tool_call> <function=NAME> <parameter=KEY> value </parameter> … </function> </tool_call>`; models omit
/// the `tool_call` tags and `</parameter>`.
pub(super) const CODER_TAGS: TagSyntax = TagSyntax {
    wrapper: Some(TagPair { open: hermes::OPEN, close: hermes::CLOSE }),
    call: TagPair { open: "<function=", close: "</function>" },
    name_ends: &[">"],
    parameter_open: "<parameter=",
    key_end: ">",
    value_openings: &[],
    value_ends: &["</parameter>", "<parameter=", "</function>", hermes::CLOSE],
    wraps_values: true,
    wraps_each_call: true,
    line_break: "\n",
    value_gap: "",
    special: &[hermes::OPEN, hermes::CLOSE],
};

impl ToolCallSyntax {
    /// XML-like `<function=…>` and `<parameter=…>`: Qwen3-Coder.
    pub const QWEN3_CODER: Self = Self::new("qwen3_coder", &CODER_TAGS);
}

impl ReasoningFamily {
    /// The output is reasoning if the prompt ends with `<think>`, or if the output begins with `<think>`.
    pub const QWEN3: Self = Self::new("qwen3", THINK_TAGS);
}
