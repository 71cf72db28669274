//! Tags of the model families that write a tool call as tags around plain-text values.
//!
//! Sources: the chat templates of Qwen/Qwen3-Coder-30B-A3B-Instruct, ByteDance-Seed/Seed-OSS-36B-Instruct,
//! MiniMaxAI/MiniMax-M2, zai-org/GLM-4.5 and GLM-4.7; the encoding of deepseek-ai/DeepSeek-V3.2.

use super::hermes;

/// Opening and closing tag of an element.
#[derive(Debug, Clone, Copy)]
pub(super) struct TagPair {
    pub open: &'static str,
    pub close: &'static str,
}

/// Conversion of the text of a value to JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ValueConversion {
    /// Converted to the type of the parameter in the tool's schema.
    Typed,
    /// As a string.
    Text,
    /// Parsed as JSON; text that is not valid JSON becomes a string.
    Json,
}

/// Text between a key and its value, and the resulting form of the value.
#[derive(Debug, Clone, Copy)]
pub(super) struct ValueOpening {
    pub text: &'static str,
    pub form: ValueConversion,
}

/// Tags of one model family.
#[derive(Debug)]
pub(super) struct TagSyntax {
    /// Tags around all calls together; models may omit these tags.
    pub wrapper: Option<TagPair>,
    /// Text before the function name, and tag after the parameters.
    pub call: TagPair,
    /// Texts that end the function name: the end of its tag, or (if the name has no tag) a line break, the
    /// next parameter or the end of the call.
    pub name_ends: &'static [&'static str],
    pub parameter_open: &'static str,
    pub key_end: &'static str,
    /// Texts that may follow `key_end` and open the value; if empty, the value follows directly and has the
    /// form `Typed`.
    pub value_openings: &'static [ValueOpening],
    /// Texts that end a value: its closing tag, and for some families the tags that may follow it.
    pub value_ends: &'static [&'static str],
    /// Whether the line breaks after the opening tag and before the closing tag of a value are syntax, not
    /// part of the value.
    pub wraps_values: bool,
    /// Whether the tags in `wrapper` enclose each call separately, not all calls together.
    pub wraps_each_call: bool,
    /// Text that the model generates between the tags of a call.
    pub line_break: &'static str,
    /// Text between `key_end` and the text that opens the value.
    pub value_gap: &'static str,
    /// Texts that may be special tokens of a tokenizer.
    pub special: &'static [&'static str],
}

/// `<tool_call> <function=NAME> <parameter=KEY> value </parameter> … </function> </tool_call>`; models omit
/// the `tool_call` tags and `</parameter>`.
pub(super) static QWEN3_CODER: TagSyntax = TagSyntax {
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

/// Qwen3-Coder's tags inside `<seed:tool_call>`, without line breaks around values.
pub(super) static SEED_OSS: TagSyntax = TagSyntax {
    wrapper: Some(TagPair { open: "<seed:tool_call>", close: "</seed:tool_call>" }),
    value_ends: &["</parameter>", "<parameter=", "</function>", "</seed:tool_call>"],
    wraps_values: false,
    special: &["<seed:tool_call>", "</seed:tool_call>"],
    ..QWEN3_CODER
};

/// `<minimax:tool_call> <invoke name="NAME"> <parameter name="KEY">value</parameter> … </invoke> …
/// </minimax:tool_call>`.
pub(super) static MINIMAX_M2: TagSyntax = TagSyntax {
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
};

/// DSML: `<｜DSML｜function_calls> <｜DSML｜invoke name="NAME"> <｜DSML｜parameter name="KEY"
/// string="true|false">value</｜DSML｜parameter> … </｜DSML｜invoke> … </｜DSML｜function_calls>`.
pub(super) static DEEPSEEK_V32: TagSyntax = TagSyntax {
    wrapper: Some(TagPair {
        open: "<｜DSML｜function_calls>", close: "</｜DSML｜function_calls>"
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
};

/// `<tool_call>NAME <arg_key>KEY</arg_key> <arg_value>value</arg_value> … </tool_call>`, each tag on its own
/// line.
pub(super) static GLM45: TagSyntax = TagSyntax {
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

/// GLM-4.5's tags without line breaks.
pub(super) static GLM47: TagSyntax = TagSyntax { line_break: "", value_gap: "", ..GLM45 };
