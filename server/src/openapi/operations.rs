//! OpenAPI documentation of the routes: summary, request body, reply and query parameters.

use serde_json::{Value, json};

/// Body of the successful reply of a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OperationReply {
    /// JSON object with the schema of this name.
    Json(&'static str),
    /// JSON object with the schema of this name, or SSE events if the request sets `stream`.
    JsonOrEvents(&'static str),
    /// No body.
    Empty,
    /// Body of this media type.
    Text(&'static str),
    /// JSON without a schema.
    AnyJson,
}

/// OpenAPI documentation of one route.
pub(super) struct OperationDoc {
    pub(super) summary: &'static str,
    /// Name of the schema of the request body of method POST.
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

/// Returns the documentation of the route at `path`; a path that is not listed gets a generic entry.
pub(super) fn operation_doc_of(path: &str) -> OperationDoc {
    use OperationReply::{AnyJson, Empty, Json, JsonOrEvents, Text};
    match path {
        "/v1/chat/completions" => operation_doc(
            "Creates a chat completion",
            Some("ChatRequest"),
            JsonOrEvents("ChatCompletion"),
        ),
        "/v1/completions" => operation_doc(
            "Creates a text completion",
            Some("CompletionRequest"),
            JsonOrEvents("TextCompletion"),
        ),
        "/v1/embeddings" | "/embeddings" => operation_doc(
            "Creates embeddings (--runner pooling)",
            Some("EmbeddingRequest"),
            Json("EmbeddingList"),
        ),
        "/score" | "/v1/score" => operation_doc(
            "Scores text pairs (--runner pooling)",
            Some("AnyObject"),
            Json("ScoreList"),
        ),
        "/rerank" | "/v1/rerank" | "/v2/rerank" => operation_doc(
            "Orders documents by relevance (--runner pooling)",
            Some("AnyObject"),
            Json("RerankResults"),
        ),
        "/v1/models" => operation_doc("Lists the served models", None, Json("ModelList")),
        "/v1/models/{*name}" => operation_doc("Returns a served model", None, Json("Model")),
        "/tokenize" | "/v1/tokenize" => {
            operation_doc("Tokenizes text or messages", Some("TokenizeRequest"), Json("Tokens"))
        }
        "/detokenize" | "/v1/detokenize" => {
            operation_doc("Detokenizes token ids", Some("DetokenizeRequest"), Json("Text"))
        }
        "/tokenizer_info" => {
            operation_doc("Returns the tokenizer configuration, if it is enabled", None, AnyJson)
        }
        "/livez" | "/live" => operation_doc("Liveness probe", None, Empty),
        "/readyz" | "/ready" | "/health" | "/ping" => operation_doc("Readiness probe", None, Empty),
        "/version" => operation_doc("Returns the server version", None, Json("Version")),
        "/load" => operation_doc("Returns the number of requests in flight", None, Json("Load")),
        "/v1/chat/completions/render" => operation_doc(
            "Returns the prompt of a chat completion as token ids",
            Some("ChatRequest"),
            AnyJson,
        ),
        "/v1/completions/render" => operation_doc(
            "Returns the prompts of a text completion as token ids",
            Some("CompletionRequest"),
            Json("RenderedPrompts"),
        ),
        "/generate" => {
            operation_doc("SGLang's native API", Some("AnyObject"), JsonOrEvents("AnyObject"))
        }
        "/health_generate" => {
            operation_doc("Generates one token, or pools one prompt", None, Empty)
        }
        "/model_info" | "/get_model_info" => {
            operation_doc("Returns the served model in SGLang's form", None, AnyJson)
        }
        "/docs" => operation_doc("List of the routes", None, Text("text/html")),
        "/server_info" | "/get_server_info" => {
            operation_doc("Returns the configuration in force", None, AnyJson)
        }
        "/openapi.json" => operation_doc("This document", None, AnyJson),
        "/reset_prefix_cache" | "/flush_cache" => {
            operation_doc("Resets the prefix cache (admin)", None, Json("Success"))
        }
        "/abort_request" | "/abort_requests" => {
            operation_doc("Aborts requests (admin)", Some("AbortRequest"), Json("Aborted"))
        }
        "/start_profile" | "/stop_profile" => {
            operation_doc("Starts or stops profiling", None, AnyJson)
        }
        "/metrics" => operation_doc("Metrics for Prometheus", None, Text("text/plain")),
        "/" => operation_doc("Status page", None, Text("text/html")),
        "/v1/responses" => {
            operation_doc("OpenAI's Responses API", Some("AnyObject"), JsonOrEvents("AnyObject"))
        }
        "/v1/responses/{id}" => {
            operation_doc("Returns or deletes a stored response", None, AnyJson)
        }
        "/v1/responses/{id}/cancel" => operation_doc("Cancels a response", None, AnyJson),
        "/v1/conversations" => operation_doc("Creates a conversation", Some("AnyObject"), AnyJson),
        "/v1/conversations/{id}" => operation_doc("A conversation", Some("AnyObject"), AnyJson),
        "/v1/conversations/{id}/items" => {
            operation_doc("The items of a conversation", Some("AnyObject"), AnyJson)
        }
        "/v1/conversations/{id}/items/{item_id}" => {
            operation_doc("An item of a conversation", None, AnyJson)
        }
        "/v1/messages" => {
            operation_doc("Anthropic's Messages API", Some("AnyObject"), JsonOrEvents("AnyObject"))
        }
        "/v1/messages/count_tokens" => {
            operation_doc("Counts the tokens of messages", Some("AnyObject"), AnyJson)
        }
        "/v1/loads" | "/loads" => operation_doc("Returns the load of each replica", None, AnyJson),
        "/kv_event_sources" => operation_doc("Lists the KV event publishers", None, AnyJson),
        "/debug/experts" => operation_doc("Returns the tokens per expert (admin)", None, AnyJson),
        "/debug/kv" => operation_doc("Returns the cached KV blocks (admin)", None, AnyJson),
        "/debug/steps" => operation_doc("Returns the latest steps (admin)", None, AnyJson),
        _ => operation_doc("", None, AnyJson),
    }
}

/// Returns the query parameters of the route at `path`: their names and schemas.
pub(super) fn queries(path: &str) -> Vec<(&'static str, Value)> {
    match path {
        "/reset_prefix_cache" | "/flush_cache" => {
            vec![("reset_running_requests", json!({"type": "boolean", "default": false}))]
        }
        "/v1/responses/{id}/input_items" | "/v1/conversations/{id}/items" => vec![
            ("after", json!({"type": "string"})),
            ("limit", json!({"type": "integer", "minimum": 1, "maximum": 100, "default": 20})),
            ("order", json!({"type": "string", "enum": ["asc", "desc"], "default": "desc"})),
        ],
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
