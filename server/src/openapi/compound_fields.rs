//! Schemas of request fields that are objects or unions, by field name. Null always means that the field is
//! absent.

use crate::pooling::PROMPTS_MAX;
use serde_json::{Value, json};

/// Returns the schema of the field `name` if it is listed here. A field name has the same meaning in every
/// request body.
pub(super) fn of(name: &str) -> Option<Value> {
    let text = json!({"type": "string"});
    let id = json!({"type": "integer", "minimum": 0});
    Some(match name {
        "messages" => json!({
            "type": "array", "minItems": 1, "maxItems": 4096,
            "items": {"$ref": "#/components/schemas/Message"},
        }),
        "prompt" => prompts(256),
        "input" => prompts(PROMPTS_MAX),
        "encoding_format" => json!({"enum": ["float", "base64", null]}),
        "embed_dtype" => json!({"enum": ["float32", null]}),
        "endianness" => json!({"enum": ["native", "little", null]}),
        "tokens" => json!({"type": "array", "items": id}),
        "stop" => json!({"oneOf": [
            {"type": "null"},
            {"type": "string", "minLength": 1, "maxLength": 256},
            {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 256}, "maxItems": 16},
        ]}),
        "logit_bias" => json!({
            "type": ["object", "null"], "maxProperties": 1024,
            "propertyNames": {"pattern": "^[0-9]+$"},
            "additionalProperties": {"type": "number"},
        }),
        "stream_options" => json!({
            "type": ["object", "null"],
            "description": "only with stream: true",
            "properties": {
                "include_usage": {"type": ["boolean", "null"]},
                "continuous_usage_stats": {"type": ["boolean", "null"]},
            },
        }),
        "request_id" | "rid" | "session_id" => {
            json!({"type": ["string", "null"], "pattern": "^[A-Za-z0-9._:-]{1,128}$"})
        }
        "cache_salt" | "extra_key" => {
            json!({"type": ["string", "null"], "pattern": "^[^@/\\\\\\u0000]{1,128}$"})
        }
        "truncation_side" => json!({"enum": ["left", "right", null]}),
        "reasoning_effort" => {
            json!({"enum": ["none", "minimal", "low", "medium", "high", "xhigh", "max", null]})
        }
        "documents" => {
            json!({"type": ["array", "null"], "maxItems": 64, "items": {"type": "object"}})
        }
        "chat_template_kwargs" => json!({"type": ["object", "null"], "maxProperties": 32}),
        "response_format" => json!({
            "type": ["object", "null"],
            "properties": {"type": text}, "required": ["type"],
        }),
        "tools" => json!({"type": ["array", "null"], "maxItems": 128, "items": {"type": "object"}}),
        "modalities" => json!({
            "type": ["array", "null"], "maxItems": 16, "contains": {"const": "text"},
            "items": {"type": "string", "minLength": 1, "maxLength": 64},
            "description": "kinds other than text have no effect",
        }),
        "user" | "safety_identifier" | "service_tier" | "metadata" => {
            json!({"description": "accepted, no effect"})
        }
        _ => return None,
    })
}

/// Returns the schema of a prompt field: one prompt, or at most `prompts_max` prompts, as text or token ids.
fn prompts(prompts_max: usize) -> Value {
    let id = json!({"type": "integer", "minimum": 0});
    json!({"oneOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": id, "minItems": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": prompts_max},
        {"type": "array", "items": {"type": "array", "items": id, "minItems": 1}, "minItems": 1,
         "maxItems": prompts_max},
    ]})
}
