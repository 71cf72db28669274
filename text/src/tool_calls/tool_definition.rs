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
