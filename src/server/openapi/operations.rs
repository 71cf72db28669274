//! What each route is for, which body it takes, and how it replies.

use serde_json::{Value, json};

/// How a route replies when all is well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reply {
    /// A JSON object of this schema.
    Json(&'static str),
    /// The same, or server-sent events if the request asked for a stream.
    JsonOrEvents(&'static str),
    /// No body.
    Empty,
    /// Something with another media type.
    Text(&'static str),
    /// Some JSON.
    AnyJson,
}

/// One line about a route.
pub(super) struct Says {
    pub(super) summary: &'static str,
    /// Schema of its body.
    pub(super) body: Option<&'static str>,
    pub(super) reply: Reply,
}

const fn says(summary: &'static str, body: Option<&'static str>, reply: Reply) -> Says {
    Says { summary, body, reply }
}

/// What a path is about. Paths that nobody described are still there.
pub(super) fn of(path: &str) -> Says {
    use Reply::{AnyJson, Empty, Json, JsonOrEvents, Text};
    match path {
        "/v1/chat/completions" => {
            says("Goes on with a conversation", Some("ChatRequest"), JsonOrEvents("ChatCompletion"))
        }
        "/v1/completions" => {
            says("Goes on with a text", Some("CompletionRequest"), JsonOrEvents("TextCompletion"))
        }
        "/v1/models" => says("Lists the served names", None, Json("ModelList")),
        "/v1/models/{*name}" => says("One served name", None, Json("Model")),
        "/tokenize" | "/v1/tokenize" => {
            says("Text or messages to token ids", Some("TokenizeRequest"), Json("Tokens"))
        }
        "/detokenize" | "/v1/detokenize" => {
            says("Token ids to text", Some("DetokenizeRequest"), Json("Text"))
        }
        "/tokenizer_info" => says("The tokenizer's configuration, if it is shown", None, AnyJson),
        "/livez" | "/live" => says("Whether the process should be left alive", None, Empty),
        "/readyz" | "/ready" | "/health" | "/ping" => {
            says("Whether new requests should be sent here", None, Empty)
        }
        "/version" => says("The version of the server", None, Json("Version")),
        "/load" => says("Requests in flight", None, Json("Load")),
        "/server_info" => says("The configuration in force", None, AnyJson),
        "/openapi.json" => says("This document", None, AnyJson),
        "/reset_prefix_cache" | "/flush_cache" => {
            says("Forgets cached prefixes (operators)", None, Json("Success"))
        }
        "/abort_request" | "/abort_requests" => {
            says("Takes requests back (operators)", Some("AbortRequest"), Json("Aborted"))
        }
        "/start_profile" | "/stop_profile" => {
            says("Begins or completes a trace of steps", None, AnyJson)
        }
        "/metrics" => says("Metrics for Prometheus", None, Text("text/plain")),
        "/" => says("The status page", None, Text("text/html")),
        "/v1/responses" => {
            says("OpenAI's Responses API", Some("AnyObject"), JsonOrEvents("AnyObject"))
        }
        "/v1/responses/{id}" => says("A stored response, or its end", None, AnyJson),
        "/v1/responses/{id}/cancel" => says("Takes a response back", None, AnyJson),
        "/v1/messages" => {
            says("Anthropic's Messages API", Some("AnyObject"), JsonOrEvents("AnyObject"))
        }
        "/v1/messages/count_tokens" => says("Tokens of messages", Some("AnyObject"), AnyJson),
        "/v1/loads" | "/loads" => says("Load of each replica", None, AnyJson),
        "/kv_event_sources" => says("Where KV events are published", None, AnyJson),
        "/debug/experts" => says("Tokens by expert (operators)", None, AnyJson),
        "/debug/kv" => says("Resident KV blocks (operators)", None, AnyJson),
        "/debug/steps" => says("The last steps (operators)", None, AnyJson),
        _ => says("", None, AnyJson),
    }
}

/// Query parameters of a path.
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
