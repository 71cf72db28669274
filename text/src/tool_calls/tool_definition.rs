//! Definition of a tool, as parsers and grammars of tool calls use it.

use serde_json::Value;

/// Function that the model may call.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolDefinition {
    /// Name of the function.
    pub name: String,
    /// JSON schema of the arguments, an object.
    pub parameters: Value,
    /// Whether the arguments match the schema also if the model is free to call the tool.
    pub is_strict: bool,
}
