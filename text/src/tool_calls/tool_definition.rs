//! Definition of a tool for the tool call parsers and grammars.

use serde_json::Value;

/// Function that the model may call.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolDefinition {
    /// Name of the function.
    pub name: String,
    /// JSON schema of the arguments, an object.
    pub parameters: Value,
    /// Whether the arguments must match the schema even when the model may choose whether to call the tool.
    pub is_strict: bool,
}

/// Whether `c` may be part of the name of a tool: the characters that requests may use, which no syntax needs for its
/// markers.
pub(super) fn is_tool_name_part(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | ':' | '/')
}
