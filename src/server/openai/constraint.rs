//! Fields that constrain the output: `response_format`, `structured_outputs` and their aliases.
//!
//! One constraint at most. Unknown keys are refused: each of them might be meant to narrow the output.

use crate::grammar::{Constraint, Form, Spaces, TEXT_BYTES_MAX};
use crate::server::error::ApiError;
use crate::server::fields::{Fields, string_list, wrong_kind};
use crate::server::json::Json;
use serde_json::Value;

/// Texts that a choice may have.
const CHOICES_MAX: usize = 4_096;
const NAME_BYTES_MAX: usize = 64;
const DESCRIPTION_BYTES_MAX: usize = TEXT_BYTES_MAX;

/// Takes the constraint of a request.
///
/// Errors: 400 naming the field or key, or the second constraint.
pub(super) fn take(fields: &mut Fields) -> Result<Option<Constraint>, ApiError> {
    let regex = fields.string("regex", TEXT_BYTES_MAX)?.map(Form::Regex);
    let schema =
        fields.take("json_schema").map(|value| schema("json_schema", value)).transpose()?;
    let schema = schema.map(|schema| Form::Json { schema, spaces: Spaces::Any });
    let named = |form: Option<Form>, param| form.map(|form| Constraint::new(form, param));
    let found = [
        response_format(fields)?,
        structured_outputs(fields)?,
        named(regex, "regex"),
        named(schema, "json_schema"),
    ];
    let mut found = found.into_iter().flatten();
    match (found.next(), found.next()) {
        (Some(first), Some(second)) => {
            let message = format!("{} constrains the output already", first.param);
            Err(ApiError::invalid(second.param, message))
        }
        (first, _) => Ok(first),
    }
}

/// `{"type": "text" | "json_object" | "json_schema"}`.
fn response_format(fields: &mut Fields) -> Result<Option<Constraint>, ApiError> {
    const NAME: &str = "response_format";
    let Some(value) = fields.take(NAME) else { return Ok(None) };
    let mut format = Fields::of(NAME.to_owned(), value)?;
    let found = match format.string("type", NAME_BYTES_MAX)?.as_deref() {
        Some("text") => None,
        Some("json_object") => Some(Constraint::new(Form::json_object(Spaces::Any), NAME)),
        Some("json_schema") => Some(named_schema(&mut format)?),
        Some(_) => {
            let message = "must be \"text\", \"json_object\" or \"json_schema\"";
            return Err(ApiError::unsupported(format.path("type"), message));
        }
        None => return Err(ApiError::invalid(format.path("type"), "is missing")),
    };
    nothing_left(&format)?;
    Ok(found)
}

/// `{"name", "description", "schema", "strict"}`. Schemas are enforced whether `strict` or not.
fn named_schema(format: &mut Fields) -> Result<Constraint, ApiError> {
    let path = format.path("json_schema");
    let Some(value) = format.take("json_schema") else {
        return Err(ApiError::invalid(path, "is missing"));
    };
    let mut named = Fields::of(path, value)?;
    named.string("name", NAME_BYTES_MAX)?;
    named.string("description", DESCRIPTION_BYTES_MAX)?;
    named.bool("strict")?;
    let path = named.path("schema");
    let Some(value) = named.take("schema") else {
        return Err(ApiError::invalid(path, "is missing"));
    };
    let schema = schema(&path, value)?;
    nothing_left(&named)?;
    Ok(Constraint::new(Form::Json { schema, spaces: Spaces::Any }, path))
}

/// Exactly one of `json`, `regex`, `choice`, `grammar`, `json_object`, and how JSON is laid out.
fn structured_outputs(fields: &mut Fields) -> Result<Option<Constraint>, ApiError> {
    const NAME: &str = "structured_outputs";
    let Some(value) = fields.take(NAME) else { return Ok(None) };
    let mut keys = Fields::of(NAME.to_owned(), value)?;
    if keys.take("structural_tag").is_some() {
        let message = "structural tags are not supported by this server";
        return Err(ApiError::unsupported(keys.path("structural_tag"), message));
    }
    let layout = Layout::take(&mut keys)?;
    let mut found = Vec::new();
    if let Some(value) = keys.take("json") {
        let mut schema = schema(&keys.path("json"), value)?;
        if layout.closed {
            close(&mut schema);
        }
        found.push(("json", Form::Json { schema, spaces: layout.spaces.clone() }));
    }
    if keys.bool("json_object")? == Some(true) {
        found.push(("json_object", Form::json_object(layout.spaces.clone())));
    }
    found.extend(keys.string("regex", TEXT_BYTES_MAX)?.map(|text| ("regex", Form::Regex(text))));
    found.extend(keys.string("grammar", TEXT_BYTES_MAX)?.map(|text| ("grammar", Form::Lark(text))));
    found.extend(choice(&mut keys)?.map(|texts| ("choice", Form::Choice(texts))));
    nothing_left(&keys)?;
    let mut found = found.into_iter();
    let (Some((key, form)), None) = (found.next(), found.next()) else {
        let message = "must have exactly one of json, json_object, regex, choice and grammar";
        return Err(ApiError::invalid(NAME, message));
    };
    layout.check(key, &keys)?;
    Ok(Some(Constraint::new(form, keys.path(key))))
}

/// Options of JSON.
struct Layout {
    spaces: Spaces,
    /// Objects have no properties but those named.
    closed: bool,
}

impl Layout {
    fn take(keys: &mut Fields) -> Result<Self, ApiError> {
        let closed = keys.bool("disable_additional_properties")?.unwrap_or(false);
        let none = keys.bool("disable_any_whitespace")?.unwrap_or(false);
        let spaces = match (none, keys.string("whitespace_pattern", TEXT_BYTES_MAX)?) {
            (true, Some(_)) => {
                let message = "cannot be given with disable_any_whitespace";
                return Err(ApiError::invalid(keys.path("whitespace_pattern"), message));
            }
            (true, None) => Spaces::None,
            (false, Some(regex)) => Spaces::Pattern(regex),
            (false, None) => Spaces::Any,
        };
        Ok(Self { spaces, closed })
    }

    /// Refuses options that the constraint `key` has no use for.
    fn check(&self, key: &str, keys: &Fields) -> Result<(), ApiError> {
        let odd = match self.spaces {
            _ if self.closed && key != "json" => Some("disable_additional_properties"),
            Spaces::None if !key.starts_with("json") => Some("disable_any_whitespace"),
            Spaces::Pattern(_) if !key.starts_with("json") => Some("whitespace_pattern"),
            _ => None,
        };
        match odd {
            None => Ok(()),
            Some(name) => {
                Err(ApiError::invalid(keys.path(name), format!("has no meaning with {key}")))
            }
        }
    }
}

/// `choice`: texts, none of them empty.
fn choice(keys: &mut Fields) -> Result<Option<Vec<String>>, ApiError> {
    let path = keys.path("choice");
    let Some(value) = keys.take("choice") else { return Ok(None) };
    let texts = string_list(&path, value, TEXT_BYTES_MAX, CHOICES_MAX)?;
    if texts.is_empty() {
        return Err(ApiError::invalid(path, "must name at least one text"));
    }
    Ok(Some(texts))
}

/// A schema, as an object or as its text.
fn schema(path: &str, value: Json) -> Result<Value, ApiError> {
    match value {
        Json::Object(_) | Json::Bool(_) => Ok(value.into_value()),
        Json::Str(text) if text.len() > TEXT_BYTES_MAX => {
            let message = format!("at most {TEXT_BYTES_MAX} bytes, got {}", text.len());
            Err(ApiError::invalid(path, message))
        }
        Json::Str(text) => match Json::parse(text.as_bytes()) {
            Ok(value @ (Json::Object(_) | Json::Bool(_))) => Ok(value.into_value()),
            Ok(other) => Err(wrong_kind(path.to_owned(), "the text of a schema", &other)),
            Err(_) => Err(ApiError::invalid(path, "is not valid JSON")),
        },
        other => Err(wrong_kind(path.to_owned(), "a schema", &other)),
    }
}

/// Forbids properties that a schema does not name, wherever it does not say otherwise.
fn close(schema: &mut Value) {
    match schema {
        Value::Array(list) => list.iter_mut().for_each(close),
        Value::Object(map) => {
            map.values_mut().for_each(close);
            let names = map.contains_key("properties") || map.contains_key("patternProperties");
            if names && !map.contains_key("additionalProperties") {
                map.insert("additionalProperties".to_owned(), Value::Bool(false));
            }
        }
        _ => {}
    }
}

fn nothing_left(fields: &Fields) -> Result<(), ApiError> {
    match fields.ignored().first() {
        None => Ok(()),
        Some(key) => Err(ApiError::unsupported(fields.path(key), "unknown key")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take_from(body: &str) -> Result<Option<Constraint>, ApiError> {
        take(&mut Fields::of_body(Json::parse(body.as_bytes())?)?)
    }

    fn found(body: &str) -> (String, Form) {
        let constraint = take_from(body).unwrap().expect("a constraint");
        (constraint.param, constraint.form)
    }

    fn refused(body: &str) -> (String, &'static str) {
        let error = take_from(body).expect_err("must be refused");
        (error.param.unwrap_or_default(), error.reason)
    }

    #[test]
    fn every_spelling_is_one_constraint() {
        assert_eq!(take_from(r#"{"response_format":{"type":"text"}}"#).unwrap(), None);
        assert_eq!(take_from(r#"{"structured_outputs":null}"#).unwrap(), None);
        let absent = r#"{"response_format":{"type":"text","json_schema":null,"what":null}}"#;
        assert_eq!(take_from(absent).unwrap(), None);
        let any =
            Form::Json { schema: serde_json::json!({"type": "integer"}), spaces: Spaces::Any };
        let schema = r#"{"type":"integer"}"#;
        let text = serde_json::to_string(schema).unwrap();
        for body in [
            format!(
                r#"{{"response_format":{{"type":"json_schema","json_schema":{{"name":"n","strict":true,"schema":{schema}}}}}}}"#
            ),
            format!(r#"{{"structured_outputs":{{"json":{schema}}}}}"#),
            format!(r#"{{"structured_outputs":{{"json":{text}}}}}"#),
            format!(r#"{{"json_schema":{text}}}"#),
        ] {
            assert_eq!(found(&body).1, any, "{body}");
        }
        let (param, form) = found(r#"{"structured_outputs":{"choice":["a","b"]}}"#);
        assert_eq!(
            (param.as_str(), form),
            ("structured_outputs.choice", Form::Choice(vec!["a".into(), "b".into()]))
        );
        assert_eq!(found(r#"{"regex":"a+"}"#), ("regex".into(), Form::Regex("a+".into())));
        let (_, form) =
            found(r#"{"structured_outputs":{"json_object":true,"disable_any_whitespace":true}}"#);
        assert_eq!(form, Form::json_object(Spaces::None));
    }

    #[test]
    fn schemas_are_closed_where_they_are_silent() {
        let body = r#"{"structured_outputs":{"disable_additional_properties":true,
            "json":{"properties":{"a":{"properties":{},"additionalProperties":{"type":"null"}}}}}}"#;
        let Form::Json { schema, .. } = found(body).1 else { panic!("a schema") };
        assert_eq!(schema["additionalProperties"], false);
        assert_eq!(schema["properties"]["a"]["additionalProperties"]["type"], "null");
    }

    #[test]
    fn refusals_name_the_key() {
        let cases = [
            (r#"{"response_format":{"type":"structural_tag"}}"#, "response_format.type"),
            (
                r#"{"response_format":{"type":"json_object","strict":true}}"#,
                "response_format.strict",
            ),
            (r#"{"response_format":{"type":"json_schema"}}"#, "response_format.json_schema"),
            (
                r#"{"response_format":{"type":"json_schema","json_schema":{"name":"x"}}}"#,
                "response_format.json_schema.schema",
            ),
            (r#"{"structured_outputs":{}}"#, "structured_outputs"),
            (r#"{"structured_outputs":{"regex":"a","choice":["b"]}}"#, "structured_outputs"),
            (
                r#"{"structured_outputs":{"regex":"a","whitespace_pattern":" "}}"#,
                "structured_outputs.whitespace_pattern",
            ),
            (
                r#"{"structured_outputs":{"structural_tag":{}}}"#,
                "structured_outputs.structural_tag",
            ),
            (r#"{"structured_outputs":{"regex":"a","backend":"x"}}"#, "structured_outputs.backend"),
            (r#"{"structured_outputs":{"json":"{"}}"#, "structured_outputs.json"),
            (r#"{"structured_outputs":{"choice":[]}}"#, "structured_outputs.choice"),
            (r#"{"regex":"a","response_format":{"type":"json_object"}}"#, "regex"),
        ];
        for (body, param) in cases {
            assert_eq!(refused(body).0, param, "{body}");
        }
    }
}
