//! Parses the tools of a Messages request. Tools with an input schema become functions that the model can
//! call. Tools defined by Anthropic (web search, code execution, bash, …) have no schema in the request and
//! are skipped.

use crate::api_error::ApiError;
use crate::openai::chat::tools::{self, RequestTools, ToolChoice};
use crate::request_fields::{RequestFields, wrong_type};
use crate::strict_json::JsonValue;
use serde_json::Value;
use text::ToolDefinition;

/// Maximum number of tools; OpenAI's API has a lower limit.
const TOOLS_MAX: usize = 1_024;
/// Types of Anthropic-defined tools that do not end with a date.
const UNDATED_TYPES: &[&str] = &["mcp_toolset", "tool_search_tool_bm25", "tool_search_tool_regex"];

/// Tools parsed so far.
#[derive(Default)]
struct AnthropicToolList {
    definitions: Vec<ToolDefinition>,
    template_tools: Vec<Value>,
    skipped_names: Vec<String>,
    /// Paths of the `strict` fields with the value true.
    strict_paths: Vec<String>,
}

/// Parses `tools` and `tool_choice`.
///
/// Errors: HTTP status 400; the error names the invalid field.
pub(super) fn take(fields: &mut RequestFields) -> Result<RequestTools, ApiError> {
    let mut list = AnthropicToolList::default();
    for (index, item) in entries(fields)?.into_iter().enumerate() {
        list.add(fields.nested(format!("tools[{index}]"), item)?)?;
    }
    let (choice, parallel) = choice(fields)?;
    let AnthropicToolList { definitions, template_tools, skipped_names, .. } = list;
    check_skipped(&choice, &definitions, &skipped_names)?;
    let template_value =
        if template_tools.is_empty() { Value::Null } else { Value::Array(template_tools) };
    let tools = RequestTools {
        definitions: definitions.into(),
        template_value,
        choice,
        parallel,
        strict_paths: list.strict_paths,
        ..RequestTools::default()
    };
    tools.check("tool_choice")?;
    Ok(tools)
}

fn entries(fields: &mut RequestFields) -> Result<Vec<JsonValue>, ApiError> {
    const NAME: &str = "tools";
    match fields.take(NAME) {
        None => Ok(Vec::new()),
        Some(JsonValue::List(list)) if list.len() <= TOOLS_MAX => Ok(list),
        Some(JsonValue::List(list)) => {
            let message = format!("at most {TOOLS_MAX} tools, got {}", list.len());
            Err(ApiError::invalid(NAME, message))
        }
        Some(other) => Err(wrong_type(NAME.to_owned(), "a list of objects", &other)),
    }
}

impl AnthropicToolList {
    fn add(&mut self, mut item: RequestFields) -> Result<(), ApiError> {
        let kind = item.string("type", 64)?.filter(|kind| kind != "custom");
        if let Some(kind) = kind.filter(|_| !item.contains("input_schema")) {
            return self.skip(&kind, &mut item);
        }
        let is_strict = item.bool("strict")?.unwrap_or(false);
        self.strict_paths.extend(is_strict.then(|| item.path("strict")));
        let tools::ParsedFunction { mut tool, template_schema } =
            tools::function(&mut item, "input_schema")?;
        tool.is_strict = is_strict;
        tools::check_unique(&self.definitions, &tool.name, item.path("name"))?;
        let description = item.string("description", usize::MAX)?;
        self.template_tools.push(tools::template_tool(&tool.name, description, template_schema));
        self.definitions.push(tool);
        Ok(())
    }

    /// Skips a tool without a schema, which the model cannot call.
    fn skip(&mut self, kind: &str, item: &mut RequestFields) -> Result<(), ApiError> {
        if !is_defined_by_anthropic(kind) {
            let message = "must be custom, or the type of a tool that Anthropic defines";
            return Err(ApiError::unsupported(item.path("type"), message));
        }
        self.skipped_names.extend(item.string("name", 256)?);
        item.accept_whole();
        Ok(())
    }
}

/// Whether a tool type is defined by Anthropic, such as `web_search_20250305`.
fn is_defined_by_anthropic(kind: &str) -> bool {
    let is_date = |date: &str| date.len() == 8 && date.bytes().all(|b| b.is_ascii_digit());
    kind.rsplit_once('_').is_some_and(|(_, date)| is_date(date)) || UNDATED_TYPES.contains(&kind)
}

/// Parses `tool_choice`; also returns whether parallel tool calls are allowed.
fn choice(fields: &mut RequestFields) -> Result<(ToolChoice, bool), ApiError> {
    let Some(value) = fields.take("tool_choice") else { return Ok((ToolChoice::Auto, true)) };
    let mut choice = fields.nested("tool_choice".to_owned(), value)?;
    let parallel = !choice.bool("disable_parallel_tool_use")?.unwrap_or(false);
    let choice = match choice.string("type", 64)?.as_deref() {
        Some("auto") => ToolChoice::Auto,
        Some("none") => ToolChoice::None,
        Some("any") => ToolChoice::Required,
        Some("tool") => tools::named_function(&mut choice)?,
        _ => return Err(ApiError::invalid("tool_choice.type", "must be auto, any, tool or none")),
    };
    Ok((choice, parallel))
}

/// Rejects a tool choice that requires a call of a skipped tool (a tool without a schema in the request,
/// which this server does not run).
fn check_skipped(
    choice: &ToolChoice,
    definitions: &[ToolDefinition],
    skipped_names: &[String],
) -> Result<(), ApiError> {
    let message = match choice {
        ToolChoice::Named(name) if skipped_names.contains(name) => {
            "names a tool that this server does not run"
        }
        ToolChoice::Required if definitions.is_empty() && !skipped_names.is_empty() => {
            "requires a tool call, but this server runs none of the tools"
        }
        _ => return Ok(()),
    };
    Err(ApiError::unsupported("tool_choice", message))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn taken(body: &Value) -> Result<(RequestTools, Vec<String>), ApiError> {
        let json = JsonValue::parse(body.to_string().as_bytes())?;
        let mut fields = RequestFields::of_body(json)?;
        let tools = take(&mut fields)?;
        Ok((tools, fields.hints().names()))
    }

    fn function(name: &str) -> Value {
        json!({"name": name, "input_schema": {"type": "object"}})
    }

    #[test]
    fn tools_that_anthropic_defines_are_skipped_and_named() {
        let kinds = [
            "web_search_20250305",
            "web_fetch_20250910",
            "code_execution_20250825",
            "bash_20250124",
            "text_editor_20250728",
            "computer_20251124",
            "memory_20250818",
            "tool_search_tool_regex_20251119",
            "tool_search_tool_bm25",
            "mcp_toolset",
        ];
        let mut list: Vec<Value> =
            kinds.iter().map(|kind| json!({"type": kind, "name": "a"})).collect();
        list.push(function("f"));
        list.push(json!({"type": "custom", "name": "g", "input_schema": {"type": "object"}, "strict": true}));
        let (tools, without_effect) = taken(&json!({"tools": list})).unwrap();
        let names: Vec<&str> = tools.definitions.iter().map(|tool| &*tool.name).collect();
        assert_eq!(names, ["f", "g"]);
        let skipped: Vec<String> =
            (0..kinds.len()).map(|index| format!("tools[{index}]")).collect();
        assert_eq!(without_effect, skipped);
        assert_eq!(tools.strict_paths, ["tools[11].strict"]);
        assert!(tools.has_strict() && !tools.definitions[0].is_strict);
        assert!(!is_defined_by_anthropic("web_search") && !is_defined_by_anthropic("a_2025030x"));
    }

    #[test]
    fn tool_choice_of_a_skipped_tool_is_rejected() {
        let search = json!({"type": "web_search_20250305", "name": "web_search"});
        let named = json!({"type": "tool", "name": "web_search"});
        for (tools, choice) in
            [(json!([search, function("f")]), named), (json!([search]), json!({"type": "any"}))]
        {
            let error = taken(&json!({"tools": tools, "tool_choice": choice})).unwrap_err();
            assert_eq!(error.param.as_deref(), Some("tool_choice"));
            assert!(error.message.contains("this server"), "{}", error.message);
        }
        let (tools, _) =
            taken(&json!({"tools": [search], "tool_choice": {"type": "auto"}})).unwrap();
        assert!(tools.definitions.is_empty() && tools.template_value.is_null());
    }

    #[test]
    fn names_have_up_to_128_characters() {
        let longest = "n".repeat(128);
        let choice = json!({"type": "tool", "name": longest});
        let (tools, _) =
            taken(&json!({"tools": [function(&longest)], "tool_choice": choice})).unwrap();
        assert_eq!(tools.choice, ToolChoice::Named(longest));
        let error = taken(&json!({"tools": [function(&"n".repeat(129))]})).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("tools[0].name"));
    }

    #[test]
    fn unknown_types_without_schema_are_rejected() {
        let error = taken(&json!({"tools": [{"type": "functoin", "name": "f"}]})).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("tools[0].type"));
    }
}
