//! Summary, body and reply of each route.

use serde_json::{Value, json};

/// Successful reply of a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OperationReply {
    /// JSON object of this schema.
    Json(&'static str),
    /// JSON object of this schema, or SSE events if the request set `stream`.
    JsonOrEvents(&'static str),
    /// No body.
    Empty,
    /// Body of this media type.
    Text(&'static str),
    /// JSON without a schema.
    AnyJson,
}

/// Documentation of a route.
pub(super) struct OperationDoc {
    pub(super) summary: &'static str,
    /// Schema name of the request body.
    pub(super) body: Option<&'static str>,
    pub(super) reply: OperationReply,
}

const fn operation_doc(
    summary: &'static str,
    body: Option<&'static str>,
    reply: OperationReply,
) -> OperationDoc {
    OperationDoc { summary, body, reply }
}

/// Returns the documentation of a path; a path without one gets a generic entry.
pub(super) fn operation_doc_of(path: &str) -> OperationDoc {
    use OperationReply::{AnyJson, Empty, Json, JsonOrEvents, Text};
    match path {
        "/v1/chat/completions" => operation_doc(
            "Goes on with a conversation",
            Some("ChatRequest"),
            JsonOrEvents("ChatCompletion"),
        ),
        "/v1/completions" => operation_doc(
            "Goes on with a text",
            Some("CompletionRequest"),
            JsonOrEvents("TextCompletion"),
        ),
        "/v1/models" => operation_doc("Lists the served names", None, Json("ModelList")),
        "/v1/models/{*name}" => operation_doc("One served name", None, Json("Model")),
        "/tokenize" | "/v1/tokenize" => {
            operation_doc("Text or messages to token ids", Some("TokenizeRequest"), Json("Tokens"))
        }
        "/detokenize" | "/v1/detokenize" => {
            operation_doc("Token ids to text", Some("DetokenizeRequest"), Json("Text"))
        }
        "/tokenizer_info" => {
            operation_doc("The tokenizer's configuration, if it is shown", None, AnyJson)
        }
        "/livez" | "/live" => {
            operation_doc("Whether the process should be left alive", None, Empty)
        }
        "/readyz" | "/ready" | "/health" | "/ping" => {
            operation_doc("Whether new requests should be sent here", None, Empty)
        }
        "/version" => operation_doc("The version of the server", None, Json("Version")),
        "/load" => operation_doc("Requests in flight", None, Json("Load")),
        "/server_info" => operation_doc("The configuration in force", None, AnyJson),
        "/openapi.json" => operation_doc("This document", None, AnyJson),
        "/reset_prefix_cache" | "/flush_cache" => {
            operation_doc("Forgets cached prefixes (operators)", None, Json("Success"))
        }
        "/abort_request" | "/abort_requests" => {
            operation_doc("Takes requests back (operators)", Some("AbortRequest"), Json("Aborted"))
        }
        "/start_profile" | "/stop_profile" => {
            operation_doc("Begins or completes a trace of steps", None, AnyJson)
        }
        "/metrics" => operation_doc("Metrics for Prometheus", None, Text("text/plain")),
        "/" => operation_doc("The status page", None, Text("text/html")),
        "/v1/responses" => {
            operation_doc("OpenAI's Responses API", Some("AnyObject"), JsonOrEvents("AnyObject"))
        }
        "/v1/responses/{id}" => operation_doc("A stored response, or its end", None, AnyJson),
        "/v1/responses/{id}/cancel" => operation_doc("Takes a response back", None, AnyJson),
        "/v1/messages" => {
            operation_doc("Anthropic's Messages API", Some("AnyObject"), JsonOrEvents("AnyObject"))
        }
        "/v1/messages/count_tokens" => {
            operation_doc("Tokens of messages", Some("AnyObject"), AnyJson)
        }
        "/v1/loads" | "/loads" => operation_doc("Load of each replica", None, AnyJson),
        "/kv_event_sources" => operation_doc("Where KV events are published", None, AnyJson),
        "/debug/experts" => operation_doc("Tokens by expert (operators)", None, AnyJson),
        "/debug/kv" => operation_doc("Resident KV blocks (operators)", None, AnyJson),
        "/debug/steps" => operation_doc("The last steps (operators)", None, AnyJson),
        _ => operation_doc("", None, AnyJson),
    }
}

/// Returns the query parameters of a path.
pub(super) fn queries(path: &str) -> Vec<(&'static str, Value)> {
    match path {
        "/reset_prefix_cache" | "/flush_cache" => {
            vec![("reset_running_requests", json!({"type": "boolean", "default": false}))]
        }
        "/v1/loads" | "/loads" => vec![
            (
                "include",
                json!({"type": "string", "enum": ["", "core", "steps", "core,steps", "all"]}),
            ),
            ("dp_rank", json!({"type": "integer", "minimum": 0, "maximum": 65_535})),
        ],
        _ => Vec::new(),
    }
}
