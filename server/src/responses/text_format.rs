//! `text` in a Responses request: the output format, which applies to messages but not to tool calls.

use crate::api_error::ApiError;
use crate::app::ServingContext;
use crate::openai::chat::tools::RequestTools;
use crate::request_fields::RequestFields;
use crate::strict_json::JsonValue;
use grammar::{GrammarSpec, JsonWhitespace, OutputConstraint};
use serde_json::{Value, json};
use text::ToolDefinition;

/// Values of the request field `text`: the output constraint, and the value repeated in the response.
pub(super) struct ResponseTextConfig {
    pub(super) constraint: Option<OutputConstraint>,
    /// Value repeated in the response object.
    pub(super) echoed: Value,
}

impl ResponseTextConfig {
    /// Parses `text`: the output format, and `verbosity`, which has no effect.
    pub(super) fn take(fields: &mut RequestFields) -> Result<Self, ApiError> {
        let plain = json!({"type": "text"});
        let Some(value) = fields.take("text") else {
            return Ok(Self { constraint: None, echoed: json!({"format": plain}) });
        };
        let mut text = fields.nested("text".to_owned(), value)?;
        let verbosity = text.accept_keyword("verbosity", &["low", "medium", "high"])?;
        let (constraint, format) = match text.take("format") {
            None => (None, plain),
            Some(value) => {
                let echoed = value.clone().into_template_value();
                (format(text.nested("text.format".to_owned(), value)?)?, echoed)
            }
        };
        let mut echoed = json!({"format": format});
        if let Some(verbosity) = verbosity {
            echoed["verbosity"] = Value::from(verbosity);
        }
        Ok(Self { constraint, echoed })
    }
}

/// Parses `text.format`; returns the output constraint.
fn format(mut format: RequestFields) -> Result<Option<OutputConstraint>, ApiError> {
    // The schema is always enforced, and only the schema.
    format.omit(&["name", "description", "strict"]);
    let spec = match format.string("type", 64)?.as_deref() {
        Some("text") => return Ok(None),
        Some("json_object") => GrammarSpec::json_object(JsonWhitespace::Any),
        Some("json_schema") => match format.take("schema") {
            Some(JsonValue::Object(pairs)) => GrammarSpec::Json {
                schema: JsonValue::Object(pairs).into_value(),
                whitespace: JsonWhitespace::Any,
            },
            _ => return Err(ApiError::invalid("text.format.schema", "must be a JSON schema")),
        },
        _ => {
            let message = "must be text, json_object or json_schema";
            return Err(ApiError::invalid("text.format.type", message));
        }
    };
    Ok(Some(OutputConstraint::new(spec, "text.format")))
}

/// Returns the constraint on the whole output: a message in the requested format or, if the model may call
/// tools, tool calls. A forced call leaves no message, so the format then has no effect.
///
/// Errors: HTTP status 400 if a tool schema is not supported.
pub(super) fn apply(
    format: Option<OutputConstraint>,
    tools: &RequestTools,
    serving: &ServingContext,
) -> Result<Option<OutputConstraint>, ApiError> {
    let Some(format) = format.filter(|_| !tools.must_call()) else { return Ok(None) };
    let syntax = serving.parsers.tool_call_syntax.filter(|_| tools.parses_tool_calls());
    let (Some(syntax), GrammarSpec::Json { schema, .. }) = (syntax, &format.spec) else {
        return Ok(Some(format));
    };
    tools.check_schemas()?;
    // If a tool is not strict, its calls may have any JSON object as arguments. But tool call syntaxes that
    // write each parameter separately need the parameter schema even then.
    let any_arguments = |tool: &ToolDefinition| {
        if tool.is_strict || !syntax.has_json_arguments() {
            return tool.clone();
        }
        ToolDefinition { parameters: json!({"type": "object"}), ..tool.clone() }
    };
    let callable: Vec<ToolDefinition> = tools.callable().map(any_arguments).collect();
    let calls = syntax.grammar(&callable, tools.parallel, &serving.tokenizer);
    let calls = calls.map_err(|error| ApiError::unsupported("tools", error.to_string()))?;
    let calls = calls.strip_prefix("start:").unwrap_or_default();
    let header = syntax.answer_header(&serving.tokenizer);
    let grammar = format!(
        "start: message | tool_calls\nmessage: {header} message_json\nmessage_json: %json {schema}\ntool_calls:{calls}"
    );
    Ok(Some(OutputConstraint::new(GrammarSpec::Lark(grammar), format.param)))
}
