//! Parses the structured output fields: `response_format`, `structured_outputs` and their aliases.
//!
//! A request has at most one constraint. Unknown keys are rejected, because the client may rely on the
//! restriction that they express.

use super::structural_tags;
use crate::api_error::ApiError;
use crate::request_fields::{RequestFields, string_list, wrong_type};
use crate::strict_json::JsonValue;
use grammar::{
    GrammarSpec, JsonWhitespace, OutputConstraint, TEXT_BYTES_MAX, ebnf_to_lark, is_ebnf,
};
use serde_json::Value;

/// Maximum number of strings in `choice`.
const CHOICES_MAX: usize = 4_096;
const NAME_BYTES_MAX: usize = 64;
const DESCRIPTION_BYTES_MAX: usize = TEXT_BYTES_MAX;

/// Parses the output constraint of a request.
///
/// Errors: HTTP status 400; the error names the invalid field or key, or the field of a second constraint.
pub(super) fn take(fields: &mut RequestFields) -> Result<Option<OutputConstraint>, ApiError> {
    let regex = fields.string("regex", TEXT_BYTES_MAX)?.map(GrammarSpec::Regex);
    let schema =
        fields.take("json_schema").map(|value| schema("json_schema", value)).transpose()?;
    let schema = schema.map(|schema| GrammarSpec::Json { schema, whitespace: JsonWhitespace::Any });
    let named =
        |spec: Option<GrammarSpec>, param| spec.map(|spec| OutputConstraint::new(spec, param));
    let found = [
        response_format(fields)?,
        structured_outputs(fields)?,
        named(regex, "regex"),
        named(schema, "json_schema"),
    ];
    let mut found = found.into_iter().flatten();
    match (found.next(), found.next()) {
        (Some(first), Some(second)) => {
            let message = format!("the output is already constrained by {}", first.param);
            Err(ApiError::invalid(second.param, message))
        }
        (first, _) => Ok(first),
    }
}

/// Parses `response_format`: `{"type": "text" | "json_object" | "json_schema" | "structural_tag"}`.
fn response_format(fields: &mut RequestFields) -> Result<Option<OutputConstraint>, ApiError> {
    const NAME: &str = "response_format";
    let Some(value) = fields.take(NAME) else { return Ok(None) };
    let mut format = RequestFields::of(NAME.to_owned(), value)?;
    let found = match format.string("type", NAME_BYTES_MAX)?.as_deref() {
        Some("text") => None,
        Some("json_object") => {
            Some(OutputConstraint::new(GrammarSpec::json_object(JsonWhitespace::Any), NAME))
        }
        Some("json_schema") => Some(named_schema(&mut format)?),
        Some("structural_tag") => {
            let spec = structural_tags::of_response_format(&mut format)?;
            Some(OutputConstraint::new(spec, NAME))
        }
        Some(_) => {
            let message =
                "must be \"text\", \"json_object\", \"json_schema\" or \"structural_tag\"";
            return Err(ApiError::unsupported(format.path("type"), message));
        }
        None => return Err(ApiError::invalid(format.path("type"), "is missing")),
    };
    reject_unknown_keys(&format)?;
    Ok(found)
}

/// Parses `{"name", "description", "schema", "strict"}`. The schema is always enforced, even if `strict` is
/// false.
fn named_schema(format: &mut RequestFields) -> Result<OutputConstraint, ApiError> {
    let path = format.path("json_schema");
    let Some(value) = format.take("json_schema") else {
        return Err(ApiError::invalid(path, "is missing"));
    };
    let mut named = RequestFields::of(path, value)?;
    named.string("name", NAME_BYTES_MAX)?;
    named.string("description", DESCRIPTION_BYTES_MAX)?;
    named.bool("strict")?;
    let path = named.path("schema");
    let Some(value) = named.take("schema") else {
        return Err(ApiError::invalid(path, "is missing"));
    };
    let schema = schema(&path, value)?;
    reject_unknown_keys(&named)?;
    Ok(OutputConstraint::new(GrammarSpec::Json { schema, whitespace: JsonWhitespace::Any }, path))
}

/// Parses `structured_outputs`: exactly one of `json`, `regex`, `choice`, `grammar`, `structural_tag` and
/// `json_object`, plus options for JSON.
fn structured_outputs(fields: &mut RequestFields) -> Result<Option<OutputConstraint>, ApiError> {
    const NAME: &str = "structured_outputs";
    let Some(value) = fields.take(NAME) else { return Ok(None) };
    let mut keys = RequestFields::of(NAME.to_owned(), value)?;
    let options = JsonConstraintOptions::take(&mut keys)?;
    let mut found = Vec::new();
    if let Some(value) = keys.take("json") {
        found.push(("json", options.json_spec(&keys.path("json"), value)?));
    }
    if keys.bool("json_object")? == Some(true) {
        found.push(("json_object", GrammarSpec::json_object(options.whitespace.clone())));
    }
    found.extend(
        keys.string("regex", TEXT_BYTES_MAX)?.map(|text| ("regex", GrammarSpec::Regex(text))),
    );
    let mut is_client_text = false;
    if let Some(text) = keys.string("grammar", TEXT_BYTES_MAX)? {
        is_client_text = !is_ebnf(&text);
        found.push(("grammar", grammar(text, &keys.path("grammar"))?));
    }
    if let Some(value) = keys.take("structural_tag") {
        let path = keys.path("structural_tag");
        found.push(("structural_tag", structural_tags::of_field(&path, value)?));
    }
    found.extend(choice(&mut keys)?.map(|texts| ("choice", GrammarSpec::Choice(texts))));
    reject_unknown_keys(&keys)?;
    let mut found = found.into_iter();
    let (Some((key, spec)), None) = (found.next(), found.next()) else {
        let message = "must have exactly one of json, json_object, regex, choice, grammar and \
                       structural_tag";
        return Err(ApiError::invalid(NAME, message));
    };
    options.check(key, &keys)?;
    let constraint = OutputConstraint::new(spec, keys.path(key));
    Ok(Some(if is_client_text { constraint.of_client_text() } else { constraint }))
}

/// Parses a grammar in EBNF or Lark syntax.
fn grammar(text: String, path: &str) -> Result<GrammarSpec, ApiError> {
    if !is_ebnf(&text) {
        return Ok(GrammarSpec::Lark(text));
    }
    let lark = ebnf_to_lark(&text).map_err(|error| ApiError::invalid(path, error.to_string()))?;
    Ok(GrammarSpec::Lark(lark))
}

/// Options of constraints on JSON outputs.
struct JsonConstraintOptions {
    whitespace: JsonWhitespace,
    /// Whether objects may contain only the properties named in their schema.
    no_additional_properties: bool,
}

impl JsonConstraintOptions {
    fn take(keys: &mut RequestFields) -> Result<Self, ApiError> {
        let no_additional_properties = keys.bool("disable_additional_properties")?.unwrap_or(false);
        let no_whitespace = keys.bool("disable_any_whitespace")?.unwrap_or(false);
        let whitespace = match (no_whitespace, keys.string("whitespace_pattern", TEXT_BYTES_MAX)?) {
            (true, Some(_)) => {
                let message = "cannot be given with disable_any_whitespace";
                return Err(ApiError::invalid(keys.path("whitespace_pattern"), message));
            }
            (true, None) => JsonWhitespace::None,
            (false, Some(regex)) => JsonWhitespace::Pattern(regex),
            (false, None) => JsonWhitespace::Any,
        };
        Ok(Self { whitespace, no_additional_properties })
    }

    /// Parses a JSON schema and applies the options to it.
    fn json_spec(&self, path: &str, value: JsonValue) -> Result<GrammarSpec, ApiError> {
        let mut schema = schema(path, value)?;
        if self.no_additional_properties {
            forbid_additional_properties(&mut schema);
        }
        Ok(GrammarSpec::Json { schema, whitespace: self.whitespace.clone() })
    }

    /// Rejects JSON options if the constraint with the key `key` does not support them.
    fn check(&self, key: &str, keys: &RequestFields) -> Result<(), ApiError> {
        let option = match self.whitespace {
            _ if self.no_additional_properties && key != "json" => {
                Some("disable_additional_properties")
            }
            JsonWhitespace::None if !key.starts_with("json") => Some("disable_any_whitespace"),
            JsonWhitespace::Pattern(_) if !key.starts_with("json") => Some("whitespace_pattern"),
            _ => None,
        };
        match option {
            None => Ok(()),
            Some(name) => {
                Err(ApiError::invalid(keys.path(name), format!("does not apply to {key}")))
            }
        }
    }
}

/// Parses `choice`: a non-empty list of non-empty strings; the output is one of them.
fn choice(keys: &mut RequestFields) -> Result<Option<Vec<String>>, ApiError> {
    let path = keys.path("choice");
    let Some(value) = keys.take("choice") else { return Ok(None) };
    let texts = string_list(&path, value, TEXT_BYTES_MAX, CHOICES_MAX)?;
    if texts.is_empty() {
        return Err(ApiError::invalid(path, "must contain at least one string"));
    }
    Ok(Some(texts))
}

/// Parses a JSON schema, given as an object or as JSON text.
fn schema(path: &str, value: JsonValue) -> Result<Value, ApiError> {
    match value {
        JsonValue::Object(_) | JsonValue::Bool(_) => Ok(value.into_value()),
        JsonValue::Str(text) if text.len() > TEXT_BYTES_MAX => {
            let message = format!("at most {TEXT_BYTES_MAX} bytes, got {}", text.len());
            Err(ApiError::invalid(path, message))
        }
        JsonValue::Str(text) => match JsonValue::parse(text.as_bytes()) {
            Ok(value @ (JsonValue::Object(_) | JsonValue::Bool(_))) => Ok(value.into_value()),
            Ok(other) => Err(wrong_type(path.to_owned(), "the text of a schema", &other)),
            Err(_) => Err(ApiError::invalid(path, "is not valid JSON")),
        },
        other => Err(wrong_type(path.to_owned(), "a schema", &other)),
    }
}

/// Sets `additionalProperties: false` in every schema that has `properties` or `patternProperties` but no
/// `additionalProperties`.
fn forbid_additional_properties(schema: &mut Value) {
    match schema {
        Value::Array(list) => list.iter_mut().for_each(forbid_additional_properties),
        Value::Object(map) => {
            map.values_mut().for_each(forbid_additional_properties);
            let has_properties =
                map.contains_key("properties") || map.contains_key("patternProperties");
            if has_properties && !map.contains_key("additionalProperties") {
                map.insert("additionalProperties".to_owned(), Value::Bool(false));
            }
        }
        _ => {}
    }
}

fn reject_unknown_keys(fields: &RequestFields) -> Result<(), ApiError> {
    match fields.ignored_names().first() {
        None => Ok(()),
        Some(key) => Err(ApiError::unsupported(fields.path(key), "unknown key")),
    }
}

#[cfg(test)]
mod tests;
