//! GLM-4, GLM-Z1 and GLM 4.5 to 4.7.
//!
//! Sources: the chat templates of zai-org/GLM-4-32B-0414, GLM-4.5 and GLM-4.7, and the example of function calls in the
//! model card of GLM-4-32B-0414.

use super::hermes;
use crate::tool_calls::{
    NamedLineSyntax, TagPair, TagSyntax, ToolCallSyntax, ValueConversion, ValueOpening,
};

/// `<tool_call>NAME <arg_key>KEY</arg_key> <arg_value>value</arg_value> … </tool_call>`, each tag on its own
/// line.
const GLM45_TAGS: TagSyntax = TagSyntax {
    wrapper: None,
    call: TagPair { open: hermes::OPEN, close: hermes::CLOSE },
    name_ends: &["\n", "<arg_key>", hermes::CLOSE],
    parameter_open: "<arg_key>",
    key_end: "</arg_key>",
    value_openings: &[ValueOpening { text: "<arg_value>", form: ValueConversion::Typed }],
    value_ends: &["</arg_value>"],
    wraps_values: false,
    wraps_each_call: false,
    line_break: "\n",
    value_gap: "\n",
    special: &[
        hermes::OPEN,
        hermes::CLOSE,
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    ],
};

impl ToolCallSyntax {
    /// The name of a function on its own line, then JSON: GLM-4, GLM-Z1.
    pub const GLM4: Self = Self::new("glm4", &NamedLineSyntax { separator: "<|assistant|>" });

    /// `<arg_key>` and `<arg_value>`, each tag on its own line: GLM 4.5, GLM 4.6.
    pub const GLM45: Self = Self::new("glm45", &GLM45_TAGS);

    /// `<arg_key>` and `<arg_value>` without line breaks: GLM 4.7.
    pub const GLM47: Self =
        Self::new("glm47", &TagSyntax { line_break: "", value_gap: "", ..GLM45_TAGS });
}
