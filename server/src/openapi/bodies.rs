//! Schemas of request bodies, from the readers of these bodies.

use super::compound_fields;
use crate::api_error::ApiError;
use crate::openai::params::{FieldBounds, SamplingDefaults};
use crate::request_fields::{FieldKind, FieldLookup, RequestFields};
use crate::strict_json::JsonValue;
use crate::{admin, openai, tokenize};
use serde_json::{Map, Value, json};

/// Bounds from here on depend on the model or on flags, and are left out.
const UNBOUNDED_FROM: i64 = u16::MAX as i64 - 1;

/// Bounds that no server exceeds.
fn widest_bounds() -> FieldBounds {
    FieldBounds {
        vocab_size: u32::MAX,
        max_model_len: u32::MAX,
        logprobs_max: None,
        replicas: u16::MAX,
        priorities: true,
    }
}

/// All bodies by name.
pub(super) fn schemas() -> Map<String, Value> {
    let (bounds, defaults) = (widest_bounds(), SamplingDefaults::default());
    let chat = |fields: &mut RequestFields| openai::chat::validate(fields, &bounds, &defaults);
    let text =
        |fields: &mut RequestFields| openai::completions::validate(fields, &bounds, &defaults);
    let detokenize = |fields: &mut RequestFields| tokenize::check_detokenize(fields, &bounds);
    let messages = json!([{"role": "user", "content": "x"}]);
    let mut schemas = Map::new();
    let mut add = |name: &str, schema: Value| schemas.insert(name.to_owned(), schema);
    add("ChatRequest", schema(&[json!({"messages": messages})], true, chat));
    add("CompletionRequest", schema(&[json!({"prompt": "x"})], true, text));
    let kinds = [json!({"prompt": "x"}), json!({"messages": messages})];
    add("TokenizeRequest", schema(&kinds, false, tokenize::check_tokenize));
    add("DetokenizeRequest", schema(&[json!({"tokens": [1]})], true, detokenize));
    add("AbortRequest", schema(&[json!({"request_id": "x"})], false, admin::check_abort));
    add("AnyObject", json!({"type": "object"}));
    schemas
}

/// The schema of what `read` takes, over the forms of a body.
///
/// `required`: whether the fields of the form must be there.
fn schema(
    forms: &[Value],
    required: bool,
    read: impl Fn(&mut RequestFields) -> Result<(), ApiError>,
) -> Value {
    let mut properties = Map::new();
    for form in forms {
        for FieldLookup { name, kind } in field_lookups(form, &read) {
            if kind == FieldKind::Any
                && form.get(&name).is_none()
                && is_rejected_field(form, &name, &read)
            {
                continue;
            }
            let schema = compound_fields::of(&name).unwrap_or_else(|| simple(&kind));
            properties.entry(name).or_insert(schema);
        }
    }
    let mut schema = json!({"type": "object", "properties": properties});
    if let (true, Some(form)) = (required, forms.first().and_then(Value::as_object)) {
        schema["required"] = form.keys().cloned().collect();
    }
    schema
}

/// What `read` looks for in a body of this form.
fn field_lookups(
    form: &Value,
    read: impl Fn(&mut RequestFields) -> Result<(), ApiError>,
) -> Vec<FieldLookup> {
    let Some(mut fields) = parse(form).map(RequestFields::recording_lookups) else {
        return Vec::new();
    };
    if let Err(error) = read(&mut fields) {
        tracing::error!(?error, "a form of the OpenAPI document is refused by its own reader");
    }
    fields.into_lookups()
}

/// Whether a field is refused as such, whatever it holds.
fn is_rejected_field(
    form: &Value,
    name: &str,
    read: impl Fn(&mut RequestFields) -> Result<(), ApiError>,
) -> bool {
    let values =
        [json!(true), json!(1), json!("a"), json!(["a"]), json!({"type": "text"}), json!([])];
    values.into_iter().all(|value| {
        let mut form = form.clone();
        form[name] = value;
        let refused = |error: ApiError| {
            error.reason == "unsupported_field" && error.param.as_deref() == Some(name)
        };
        parse(&form).is_some_and(|mut fields| read(&mut fields).is_err_and(refused))
    })
}

fn parse(form: &Value) -> Option<RequestFields> {
    RequestFields::of_body(JsonValue::parse(form.to_string().as_bytes()).ok()?).ok()
}

/// The schema of a field whose reader knows its type.
fn simple(kind: &FieldKind) -> Value {
    match kind {
        FieldKind::Any => json!({}),
        FieldKind::Bool => json!({"type": ["boolean", "null"]}),
        FieldKind::Int(range) => int(&json!(["integer", "null"]), *range.start(), *range.end()),
        FieldKind::Float { range, low_open } => {
            let low = if *low_open { "exclusiveMinimum" } else { "minimum" };
            let mut schema = json!({"type": ["number", "null"], low: range.start()});
            if *range.end() < f32::MAX {
                schema["maximum"] = json!(range.end());
            }
            schema
        }
        FieldKind::Str(bytes_max) => {
            let mut schema = json!({"type": ["string", "null"]});
            limit(&mut schema, "maxLength", *bytes_max);
            schema
        }
        FieldKind::Ints { range, len_max } => {
            let items = int(&json!("integer"), *range.start(), *range.end());
            list(&items, *len_max)
        }
        FieldKind::Strings { bytes_max, len_max } => {
            let mut items = json!({"type": "string", "minLength": 1});
            limit(&mut items, "maxLength", *bytes_max);
            list(&items, *len_max)
        }
    }
}

/// An integer. Upper ends that follow from a model or from flags are left out.
fn int(kind: &Value, low: i64, high: i64) -> Value {
    let mut schema = json!({"type": kind, "minimum": low});
    if high < UNBOUNDED_FROM || high == i64::from(i32::MAX) || high == i64::MAX {
        schema["maximum"] = json!(high);
    }
    schema
}

fn list(items: &Value, len_max: usize) -> Value {
    let mut schema = json!({"type": ["array", "null"], "items": items});
    limit(&mut schema, "maxItems", len_max);
    schema
}

fn limit(schema: &mut Value, name: &str, max: usize) {
    if max < UNBOUNDED_FROM as usize {
        schema[name] = json!(max);
    }
}
