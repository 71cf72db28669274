//! Structural tags of a request: `response_format` of type `structural_tag`, and
//! `structured_outputs.structural_tag`.

use crate::api_error::ApiError;
use crate::request_fields::RequestFields;
use crate::strict_json::JsonValue;
use grammar::{GrammarSpec, TEXT_BYTES_MAX, structural_tag_grammar};
use serde_json::{Map, Value};

/// Members of a structural tag in `response_format`.
const MEMBERS: [&str; 3] = ["format", "structures", "triggers"];

/// Converts a structural tag whose members are directly in `response_format`.
///
/// Errors: HTTP status 400 with the path of the invalid or unsupported value.
pub(super) fn of_response_format(format: &mut RequestFields) -> Result<GrammarSpec, ApiError> {
    let mut members = Map::new();
    for name in MEMBERS {
        members.extend(format.take(name).map(|value| (name.to_owned(), value.into_value())));
    }
    grammar_of(&Value::Object(members), format.own_path())
}

/// Converts a structural tag in the field `path`, given as an object or as JSON text.
///
/// Errors: HTTP status 400 with the path of the invalid or unsupported value.
pub(super) fn of_field(path: &str, value: JsonValue) -> Result<GrammarSpec, ApiError> {
    let tag = match value {
        JsonValue::Str(text) if text.len() > TEXT_BYTES_MAX => {
            let message = format!("at most {TEXT_BYTES_MAX} bytes, got {}", text.len());
            return Err(ApiError::invalid(path, message));
        }
        JsonValue::Str(text) => match JsonValue::parse(text.as_bytes()) {
            Ok(value) => value,
            Err(_) => return Err(ApiError::invalid(path, "is not valid JSON")),
        },
        value => value,
    };
    grammar_of(&tag.into_value(), path)
}

fn grammar_of(tag: &Value, path: &str) -> Result<GrammarSpec, ApiError> {
    structural_tag_grammar(tag).map(GrammarSpec::Lark).map_err(|error| {
        let path = match error.path.as_str() {
            "" => path.to_owned(),
            inner => format!("{path}.{inner}"),
        };
        ApiError::unsupported(path, error.message)
    })
}
