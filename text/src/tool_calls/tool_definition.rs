//! What parsers and grammars know of a tool.

use serde_json::Value;

/// A function that the model may call.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolDefinition {
    /// Its name.
    pub name: String,
    /// JSON schema of its arguments, an object.
    pub parameters: Value,
}
