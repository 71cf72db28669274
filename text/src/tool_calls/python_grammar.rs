//! Grammar of a call in Python syntax with values in JSON syntax: `name(key="text", other=[1, 2])`.

use super::call_grammar::{CallGrammarError, CallGrammarWriter};
use super::call_parameters::{CallParameters, call_variants};
use super::schema_refs::extracted;
use super::tool_definition::ToolDefinition;
use grammar::lark_text::literal;
use serde_json::json;

/// Builds the right-hand side of the rule for the arguments of a call.
///
/// Errors: the arguments of the tool cannot be written as keyword arguments.
pub(super) fn python_arguments(
    index: usize,
    tool: &ToolDefinition,
    writer: &mut CallGrammarWriter<'_>,
) -> Result<String, CallGrammarError> {
    let mut alternatives = Vec::new();
    for (at, variant) in call_variants(tool)?.iter().enumerate() {
        alternatives.push(arguments(&format!("{index}_{at}"), variant, tool, writer)?);
    }
    Ok(alternatives.join(" | "))
}

/// Builds the right-hand side of a rule that accepts any keyword arguments.
pub(super) fn any_arguments(writer: &mut CallGrammarWriter<'_>) -> String {
    writer.json_rule("any_text", &json!({"type": "string"}));
    writer.json_rule("any_scalar", &json!({"type": ["number", "boolean", "null"]}));
    writer.rule("QUOTED", "/'(?:[^'\\\\\\x00-\\x1f]|\\\\['\"\\\\nrt])*'/");
    writer.rule("any_key", "any_text | QUOTED");
    writer.rule("any_list", "\"[\" (any_value (\", \" any_value)*)? \"]\"");
    writer.rule("any_member", "any_key \": \" any_value");
    writer.rule("any_dict", "\"{\" (any_member (\", \" any_member)*)? \"}\"");
    let python = "\"True\" | \"False\" | \"None\" | any_key | any_list | any_dict";
    writer.rule("any_value", &format!("any_scalar | {python}"));
    writer.rule("ANY_KEY", "/[a-zA-Z_][a-zA-Z0-9_]{0,63}=/");
    "(ANY_KEY any_value (\", \" ANY_KEY any_value)*)?".to_owned()
}

/// Adds the rules for the arguments of one alternative of the schema and returns the name of the first rule.
/// Each argument has two rules, because a comma precedes every argument except the first one.
fn arguments(
    variant: &str,
    CallParameters { parameters, .. }: &CallParameters,
    tool: &ToolDefinition,
    writer: &mut CallGrammarWriter<'_>,
) -> Result<String, CallGrammarError> {
    let is_writable = |key: &str| {
        !key.is_empty() && key.chars().all(|c| c.is_ascii_alphanumeric() || "_-.".contains(c))
    };
    let mut written = Vec::new();
    for parameter in parameters {
        let key = &parameter.key;
        if is_writable(key) {
            written.push(parameter);
        } else if parameter.is_required {
            let (tool, key) = (tool.name.clone(), key.clone());
            return Err(CallGrammarError::UnsupportedKey { tool, key });
        }
    }
    for (at, parameter) in written.iter().enumerate() {
        writer.check_length()?;
        let value = format!("value_{variant}_{at}");
        writer.json_rule(&value, &extracted(&tool.parameters, &parameter.schema));
        let (key, next) = (literal(&format!("{}=", parameter.key)), at + 1);
        for (name, comma, skipped) in [("first", "", "first"), ("more", "\", \" ", "more")] {
            let skip = if parameter.is_required {
                String::new()
            } else {
                format!(" | {skipped}_{variant}_{next}")
            };
            let body = format!("{comma}{key} {value} more_{variant}_{next}{skip}");
            writer.rule(&format!("{name}_{variant}_{at}"), &body);
        }
    }
    for name in ["first", "more"] {
        writer.rule(&format!("{name}_{variant}_{}", written.len()), "\"\"");
    }
    Ok(format!("first_{variant}_0"))
}
