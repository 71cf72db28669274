//! OpenAPI documentation of the routes: summary, request body, reply and query parameters.

use OperationReplyDoc::{AnyJson, Empty, Json, JsonOrEvents, Text};
use serde_json::{Value, json};

/// Documentation of the body of a route's successful reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OperationReplyDoc {
    /// JSON object with the schema of this name.
    Json(&'static str),
    /// JSON object with the schema of this name, or SSE events if the request sets `stream`.
    JsonOrEvents(&'static str),
    /// The reply has no body.
    Empty,
    /// Body with this media type.
    Text(&'static str),
    /// JSON value for which the document contains no schema.
    AnyJson,
}

/// OpenAPI documentation of one route.
#[derive(Clone, Copy)]
pub(super) struct OperationDoc {
    pub(super) summary: &'static str,
    /// Name of the schema of the request body, for method POST.
    pub(super) body: Option<&'static str>,
    pub(super) reply: OperationReplyDoc,
}

/// Documentation shared by the routes at several paths.
struct DocumentedPaths {
    paths: &'static [&'static str],
    doc: OperationDoc,
}

const fn documented(
    paths: &'static [&'static str],
    summary: &'static str,
    body: Option<&'static str>,
    reply: OperationReplyDoc,
) -> DocumentedPaths {
    DocumentedPaths { paths, doc: OperationDoc { summary, body, reply } }
}

/// Documentation of the listed routes.
const DOCUMENTED: &[DocumentedPaths] = &[
    documented(
        &["/v1/chat/completions"],
        "Creates a chat completion",
        Some("ChatRequest"),
        JsonOrEvents("ChatCompletion"),
    ),
    documented(
        &["/v1/completions"],
        "Creates a text completion",
        Some("CompletionRequest"),
        JsonOrEvents("TextCompletion"),
    ),
    documented(
        &["/v1/embeddings", "/embeddings"],
        "Creates embeddings (--runner pooling)",
        Some("EmbeddingRequest"),
        Json("EmbeddingList"),
    ),
    documented(
        &["/score", "/v1/score"],
        "Scores text pairs (--runner pooling)",
        Some("AnyObject"),
        Json("ScoreList"),
    ),
    documented(
        &["/rerank", "/v1/rerank", "/v2/rerank"],
        "Orders documents by relevance (--runner pooling)",
        Some("AnyObject"),
        Json("RerankResults"),
    ),
    documented(&["/v1/models"], "Lists the served models", None, Json("ModelList")),
    documented(&["/v1/models/{*name}"], "Returns a served model", None, Json("Model")),
    documented(
        &["/tokenize", "/v1/tokenize"],
        "Tokenizes text or messages",
        Some("TokenizeRequest"),
        Json("Tokens"),
    ),
    documented(
        &["/detokenize", "/v1/detokenize"],
        "Detokenizes token ids",
        Some("DetokenizeRequest"),
        Json("Text"),
    ),
    documented(
        &["/tokenizer_info"],
        "Returns the tokenizer configuration, if it is enabled",
        None,
        AnyJson,
    ),
    documented(&["/livez", "/live"], "Liveness probe", None, Empty),
    documented(&["/readyz", "/ready", "/health", "/ping"], "Readiness probe", None, Empty),
    documented(&["/version"], "Returns the server version", None, Json("Version")),
    documented(&["/load"], "Returns the number of requests in flight", None, Json("Load")),
    documented(
        &["/v1/chat/completions/render"],
        "Returns the prompt of a chat completion as token ids",
        Some("ChatRequest"),
        AnyJson,
    ),
    documented(
        &["/v1/completions/render"],
        "Returns the prompts of a text completion as token ids",
        Some("CompletionRequest"),
        Json("RenderedPrompts"),
    ),
    documented(&["/generate"], "SGLang's native API", Some("AnyObject"), JsonOrEvents("AnyObject")),
    documented(&["/health_generate"], "Generates one token, or pools one prompt", None, Empty),
    documented(
        &["/model_info", "/get_model_info"],
        "Returns the served model in SGLang's form",
        None,
        AnyJson,
    ),
    documented(&["/docs"], "List of the routes", None, Text("text/html")),
    documented(
        &["/server_info", "/get_server_info"],
        "Returns the configuration in force",
        None,
        AnyJson,
    ),
    documented(&["/openapi.json"], "This document", None, AnyJson),
    documented(
        &["/reset_prefix_cache", "/flush_cache"],
        "Resets the prefix cache (admin)",
        None,
        Json("Success"),
    ),
    documented(
        &["/abort_request", "/abort_requests"],
        "Aborts requests (admin)",
        Some("AbortRequest"),
        Json("Aborted"),
    ),
    documented(&["/start_profile", "/stop_profile"], "Starts or stops profiling", None, AnyJson),
    documented(&["/metrics"], "Metrics for Prometheus", None, Text("text/plain")),
    documented(&["/"], "Status page", None, Text("text/html")),
    documented(
        &["/v1/responses"],
        "OpenAI's Responses API",
        Some("AnyObject"),
        JsonOrEvents("AnyObject"),
    ),
    documented(&["/v1/responses/{id}"], "Returns or deletes a stored response", None, AnyJson),
    documented(&["/v1/responses/{id}/cancel"], "Cancels a response", None, AnyJson),
    documented(&["/v1/conversations"], "Creates a conversation", Some("AnyObject"), AnyJson),
    documented(&["/v1/conversations/{id}"], "A conversation", Some("AnyObject"), AnyJson),
    documented(
        &["/v1/conversations/{id}/items"],
        "The items of a conversation",
        Some("AnyObject"),
        AnyJson,
    ),
    documented(
        &["/v1/conversations/{id}/items/{item_id}"],
        "An item of a conversation",
        None,
        AnyJson,
    ),
    documented(
        &["/v1/messages"],
        "Anthropic's Messages API",
        Some("AnyObject"),
        JsonOrEvents("AnyObject"),
    ),
    documented(
        &["/v1/messages/count_tokens"],
        "Counts the tokens of messages",
        Some("AnyObject"),
        AnyJson,
    ),
    documented(&["/v1/loads", "/loads"], "Returns the load of each replica", None, AnyJson),
    documented(&["/kv_event_sources"], "Lists the KV event publishers", None, AnyJson),
    documented(&["/debug/experts"], "Returns the tokens per expert (admin)", None, AnyJson),
    documented(&["/debug/kv"], "Returns the cached KV blocks (admin)", None, AnyJson),
    documented(&["/debug/steps"], "Returns the latest steps (admin)", None, AnyJson),
    documented(
        &["/v1/responses/{id}/input_items"],
        "The input items of a stored response",
        None,
        AnyJson,
    ),
];

/// Returns the documentation of the route at `path`; an unlisted path gets a generic entry.
pub(super) fn operation_doc_of(path: &str) -> OperationDoc {
    let found = DOCUMENTED.iter().find(|documented| documented.paths.contains(&path));
    found.map_or(OperationDoc { summary: "", body: None, reply: AnyJson }, |found| found.doc)
}

/// Returns the names and schemas of the query parameters of the route at `path`.
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
