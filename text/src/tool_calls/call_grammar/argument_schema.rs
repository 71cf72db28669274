//! Schemas of arguments that are written as JSON.

use super::super::ToolDefinition;
use super::CallGrammarError;
use serde_json::{Value, json};

/// Returns the schema of a tool's arguments, restricted to objects.
pub(crate) fn object_schema(tool: &ToolDefinition) -> Result<Value, CallGrammarError> {
    let mut schema = tool.parameters.as_object().cloned().unwrap_or_default();
    let is_object = match schema.get("type") {
        None => true,
        Some(Value::Array(names)) => names.iter().any(|name| name == "object"),
        Some(name) => name == "object",
    };
    if !is_object {
        return Err(CallGrammarError::NoObject { tool: tool.name.clone() });
    }
    schema.insert("type".to_owned(), Value::from("object"));
    Ok(Value::Object(schema))
}

/// Returns the schema with whitespace restricted to the form that chat templates print; without the
/// restriction, a model could generate unlimited whitespace.
pub(super) fn with_python_whitespace(schema: &Value) -> Value {
    let mut object = schema.as_object().cloned().unwrap_or_default();
    let options =
        json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "});
    object.insert("x-guidance".to_owned(), options);
    Value::Object(object)
}
