//! Maps each callable tool of a request to one function name in the prompt, and maps calls of that function
//! back to the tool: a function or a custom tool, with or without a namespace.

use std::collections::HashMap;

/// Tool that the response names for a function call in the output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CalledTool {
    pub(super) namespace: Option<String>,
    pub(super) name: String,
    /// Whether the tool is a custom tool, whose input is plain text instead of a JSON object.
    pub(super) is_custom: bool,
}

/// Tools of a request, by their function name in the prompt. Functions without a namespace are not listed,
/// because their function name is also their tool name.
#[derive(Debug, Clone, Default)]
pub(super) struct ToolNameMap {
    by_function: HashMap<String, CalledTool>,
}

impl ToolNameMap {
    /// Adds a tool under its function name.
    pub(super) fn insert(&mut self, tool: CalledTool) {
        if tool.is_custom || tool.namespace.is_some() {
            let function = function_name(tool.namespace.as_deref(), &tool.name);
            self.by_function.insert(function, tool);
        }
    }

    /// Returns the tool that the response names for a call of `function`.
    pub(super) fn called(&self, function: &str) -> CalledTool {
        self.by_function.get(function).cloned().unwrap_or_else(|| CalledTool {
            namespace: None,
            name: function.to_owned(),
            is_custom: false,
        })
    }
}

/// Returns the function name that represents a tool in the prompt.
pub(super) fn function_name(namespace: Option<&str>, name: &str) -> String {
    match namespace {
        Some(namespace) => format!("{namespace}__{name}"),
        None => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_flattened_and_given_back() {
        let mut names = ToolNameMap::default();
        let tool = |namespace: Option<&str>, name: &str, is_custom| CalledTool {
            namespace: namespace.map(str::to_owned),
            name: name.to_owned(),
            is_custom,
        };
        let tools = [
            tool(Some("mcp"), "find", false),
            tool(Some("mcp"), "patch", true),
            tool(None, "patch", true),
            tool(None, "shell", false),
        ];
        for tool in &tools {
            names.insert(tool.clone());
        }
        for tool in tools {
            let function = function_name(tool.namespace.as_deref(), &tool.name);
            assert_eq!(names.called(&function), tool);
        }
        assert_eq!(names.called("mcp__other"), tool(None, "mcp__other", false));
    }
}
