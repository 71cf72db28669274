//! Schemas of the replies in the OpenAPI document.

use super::operations::OperationReplyDoc;
use serde_json::{Map, Value, json};

/// Returns the OpenAPI entry for a successful response with this reply.
pub(super) fn reply(reply: OperationReplyDoc) -> Value {
    let of = |name: &str| json!({"schema": {"$ref": format!("#/components/schemas/{name}")}});
    match reply {
        OperationReplyDoc::Json(name) => {
            json!({"description": "OK", "content": {"application/json": of(name)}})
        }
        OperationReplyDoc::JsonOrEvents(name) => json!({
            "description": "OK; with stream: true, SSE events of the route's API",
            "content": {
                "application/json": of(name),
                "text/event-stream": {"schema": server_sent_event()},
            },
        }),
        OperationReplyDoc::AnyJson => {
            json!({"description": "OK", "content": {"application/json": {"schema": {"type": "object"}}}})
        }
        OperationReplyDoc::Text(kind) => {
            json!({"description": "OK", "content": {kind: {"schema": {"type": "string"}}}})
        }
        OperationReplyDoc::Empty => json!({"description": "OK"}),
    }
}

/// Returns the schema of one SSE event: in the OpenAPI document, `schema` describes each event of the stream.
fn server_sent_event() -> Value {
    let text = json!({"type": "string"});
    json!({"type": "object", "properties": {"event": text, "data": text}, "required": ["data"]})
}

/// Returns the schema of an object with these properties, all of which are required.
fn object(properties: &Value) -> Value {
    let names: Vec<String> =
        properties.as_object().map(|of| of.keys().cloned().collect()).unwrap_or_default();
    json!({"type": "object", "properties": properties, "required": names})
}

fn list_of(name: &str) -> Value {
    json!({"type": "array", "items": {"$ref": format!("#/components/schemas/{name}")}})
}

/// Returns the schemas of all replies by name.
pub(super) fn schemas() -> Map<String, Value> {
    let [text, int, flag] = ["string", "integer", "boolean"].map(|kind| json!({"type": kind}));
    let mut schemas = Map::new();
    let mut add = |name: &str, schema: Value| schemas.insert(name.to_owned(), schema);
    errors(&mut add);
    add("RenderedPrompts", json!({"type": "array", "items": {"type": "object"}}));
    add("Version", object(&json!({"version": text})));
    add("Load", object(&json!({"server_load": int})));
    add("Success", object(&json!({"success": flag})));
    add("Aborted", object(&json!({"aborted": int})));
    add("Text", object(&json!({"prompt": text})));
    let strs = json!({"type": ["array", "null"], "items": text});
    let ids = json!({"type": "array", "items": int});
    add(
        "Tokens",
        object(&json!({"count": int, "max_model_len": int, "tokens": ids, "token_strs": strs})),
    );
    let model = json!({
        "id": text, "object": {"const": "model"}, "created": int, "owned_by": text, "root": text,
        "parent": {"type": "null"}, "max_model_len": int, "permission": {"type": "array"},
    });
    add("Model", object(&model));
    add("ModelList", object(&json!({"object": {"const": "list"}, "data": list_of("Model")})));
    completions(&mut add);
    pooling(&mut add);
    schemas
}

fn errors(add: &mut impl FnMut(&str, Value) -> Option<Value>) {
    let text = json!({"type": "string"});
    let nullable_text = json!({"type": ["string", "null"]});
    // `code` is OpenAI's string code for context length errors, and the HTTP status for other errors.
    let code = json!({"type": ["integer", "string"]});
    let error = object(&json!({
        "message": text, "type": text, "param": nullable_text, "code": code, "reason": text,
    }));
    add("Error", object(&json!({"error": error})));
    let error = object(&json!({"type": text, "message": text}));
    add("MessagesError", object(&json!({"type": {"const": "error"}, "error": error})));
}

fn pooling(add: &mut impl FnMut(&str, Value) -> Option<Value>) {
    let [text, int, number] = ["string", "integer", "number"].map(|kind| json!({"type": kind}));
    let embedding = json!({"oneOf": [{"type": "array", "items": number}, text]});
    let vector = json!({"index": int, "object": {"const": "embedding"}, "embedding": embedding});
    let score = json!({"index": int, "object": {"const": "score"}, "score": number});
    for (name, entry) in [("Embedding", vector), ("Score", score)] {
        add(name, object(&entry));
        let list = json!({
            "id": text, "object": {"const": "list"}, "created": int, "model": text,
            "system_fingerprint": text, "data": list_of(name),
            "usage": {"$ref": "#/components/schemas/Usage"},
        });
        add(&format!("{name}List"), object(&list));
    }
    let mut result = object(&json!({"index": int, "relevance_score": number}));
    result["properties"]["document"] = json!({"type": "object"});
    add("RerankResult", result);
    let usage = object(&json!({"prompt_tokens": int, "total_tokens": int}));
    let reply =
        json!({"id": text, "model": text, "usage": usage, "results": list_of("RerankResult")});
    add("RerankResults", object(&reply));
}

fn completions(add: &mut impl FnMut(&str, Value) -> Option<Value>) {
    let [text, int] = ["string", "integer"].map(|kind| json!({"type": kind}));
    let usage = json!({"prompt_tokens": int, "completion_tokens": int, "total_tokens": int});
    add("Usage", object(&usage));
    let finish = json!({"enum": ["stop", "length", "tool_calls", "abort", "error"]});
    let stop = json!({"type": ["string", "integer", "null"]});
    let logprobs = json!({"type": ["object", "null"]});
    add(
        "TextChoice",
        object(&json!({
            "index": int, "text": text, "logprobs": logprobs, "finish_reason": finish,
            "stop_reason": stop,
        })),
    );
    let message_schema = object(&json!({
        "role": {"const": "assistant"}, "content": {"type": ["string", "null"]},
    }));
    add(
        "ChatChoice",
        object(&json!({
            "index": int, "message": message_schema, "logprobs": logprobs, "finish_reason": finish,
            "stop_reason": stop,
        })),
    );
    for (name, kind, choice) in [
        ("TextCompletion", "text_completion", "TextChoice"),
        ("ChatCompletion", "chat.completion", "ChatChoice"),
    ] {
        let completion = json!({
            "id": text, "object": {"const": kind}, "created": int, "model": text,
            "system_fingerprint": text, "choices": list_of(choice),
            "usage": {"$ref": "#/components/schemas/Usage"},
        });
        add(name, object(&completion));
    }
    let parts = json!({"type": "array", "items": object(&json!({"type": {"const": "text"}, "text": text}))});
    let mut message = json!({"type": "object", "required": ["role"]});
    message["properties"] = json!({
        "role": {"type": "string", "minLength": 1, "maxLength": 64},
        "content": {"oneOf": [text, parts, {"type": "null"}]},
        "name": {"type": "string"},
    });
    add("Message", message);
}
