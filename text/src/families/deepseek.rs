//! DeepSeek R1, V3, V3.1 and V3.2.
//!
//! Sources: the chat templates of deepseek-ai/DeepSeek-V3-0324 and DeepSeek-V3.1; the encoding of DeepSeek-V3.2.

use super::qwen::THINK_TAGS;
use crate::reasoning::ReasoningFamily;
use crate::tool_calls::{
    CallHeaderFormat, JsonSectionSyntax, TagPair, TagSyntax, ToolCallSyntax, ValueConversion,
    ValueOpening,
};

/// A type, a function name and JSON in a code fence.
const FENCED_CALLS: JsonSectionSyntax = JsonSectionSyntax {
    section_open: "<｜tool▁calls▁begin｜>",
    section_close: "<｜tool▁calls▁end｜>",
    call_open: "<｜tool▁call▁begin｜>",
    call_close: "<｜tool▁call▁end｜>",
    separator: "<｜tool▁sep｜>",
    head: CallHeaderFormat::Type,
    between: "\n",
};

impl ToolCallSyntax {
    /// JSON in a code fence, between special tokens: DeepSeek V3, R1.
    pub const DEEPSEEK_V3: Self = Self::new("deepseek_v3", &FENCED_CALLS);

    /// JSON between special tokens: DeepSeek V3.1.
    pub const DEEPSEEK_V31: Self = Self::new(
        "deepseek_v31",
        &JsonSectionSyntax { head: CallHeaderFormat::Name, between: "", ..FENCED_CALLS },
    );

    /// DSML: `<｜DSML｜function_calls> <｜DSML｜invoke name="NAME"> <｜DSML｜parameter name="KEY"
    /// string="true|false">value</｜DSML｜parameter> … </｜DSML｜invoke> … </｜DSML｜function_calls>`: DeepSeek V3.2.
    pub const DEEPSEEK_V32: Self = Self::new(
        "deepseek_v32",
        &TagSyntax {
            wrapper: Some(TagPair {
                open: "<｜DSML｜function_calls>",
                close: "</｜DSML｜function_calls>",
            }),
            call: TagPair { open: "<｜DSML｜invoke name=\"", close: "</｜DSML｜invoke>" },
            name_ends: &["\">"],
            parameter_open: "<｜DSML｜parameter name=\"",
            key_end: "\"",
            value_openings: &[
                ValueOpening { text: "string=\"true\">", form: ValueConversion::Text },
                ValueOpening { text: "string=\"false\">", form: ValueConversion::Json },
                ValueOpening { text: ">", form: ValueConversion::Typed },
            ],
            value_ends: &["</｜DSML｜parameter>"],
            wraps_values: false,
            wraps_each_call: false,
            line_break: "\n",
            value_gap: " ",
            special: &["｜DSML｜"],
        },
    );
}

impl ReasoningFamily {
    /// The output starts with reasoning unless the prompt ends with `</think>`.
    pub const DEEPSEEK_R1: Self = Self::new("deepseek_r1", THINK_TAGS).always_reasoning();

    /// The output is reasoning if it begins with `<think>`, or if the prompt ends with `<think>`. Templates
    /// end the prompt with `<think>` if `thinking` is true in `chat_template_kwargs`.
    pub const DEEPSEEK_V3: Self = Self::new("deepseek_v3", THINK_TAGS);
}
