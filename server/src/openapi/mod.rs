//! `/openapi.json`: request and reply schemas of the routes, as OpenAPI 3.1.
//!
//! Types and ranges of fields are not defined a second time here. The routes come from the route table. The
//! body fields come from the code that validates requests: it runs on a small example body while its field
//! lookups are recorded. Fields without a simple type have a schema in `compound_fields.rs`; tests send
//! requests with such fields.

mod bodies;
mod compound_fields;
mod operations;
mod replies;

use super::app::AppState;
use super::auth::RouteAccess;
use super::routes::{HttpRoute, table};
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderValue, Response, header};
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Returns the OpenAPI document.
pub async fn serve(State(app): State<Arc<AppState>>) -> Response<Body> {
    let text = app.openapi.get_or_init(|| document().to_string().into());
    let mut response = Response::new(Body::from(text.clone()));
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, json);
    response
}

/// Builds the OpenAPI document. The document is the same for every model: bounds that depend on the model or
/// the command line are omitted.
pub fn document() -> Value {
    let mut paths = Map::new();
    for route in table() {
        let path = route.path.replace("{*", "{");
        let entry = paths.entry(path).or_insert_with(|| json!({}));
        entry[route.method] = operation(&route);
    }
    let mut schemas = replies::schemas();
    schemas.extend(bodies::schemas());
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Hadron",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "OpenAI-compatible API and admin routes. A null value means that the field is absent. \
                            Unknown fields are listed in the reply header X-Hadron-Ignored-Fields.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [{}, {"bearer": []}, {"key": []}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    })
}

fn operation(route: &HttpRoute) -> Value {
    let doc = operations::operation_doc_of(route.path);
    let mut operation = json!({
        "summary": doc.summary,
        "operationId": operation_id(route),
        "responses": {
            "200": replies::reply(doc.reply),
            "default": {
                "description": "Error",
                "content": {"application/json": {"schema": error_schema(route.path)}},
            },
        },
    });
    if route.access == RouteAccess::Open {
        operation["security"] = json!([]);
    }
    let body = doc.body.filter(|_| route.method == "post");
    if let Some(body) = body {
        let schema = json!({"$ref": format!("#/components/schemas/{body}")});
        let content = json!({"application/json": {"schema": schema}});
        operation["requestBody"] = json!({"required": true, "content": content});
    }
    // The query parameters of a path apply to its methods without a request body.
    let parameters = parameters(route.path, body.is_none());
    if !parameters.is_empty() {
        operation["parameters"] = Value::from(parameters);
    }
    operation
}

/// Returns the schema of an error body. Routes of the Anthropic API have Anthropic's schema, or the common
/// one, because the error for a malformed request head may have the common JSON form if the path cannot be
/// read.
fn error_schema(path: &str) -> Value {
    let common = json!({"$ref": "#/components/schemas/Error"});
    if path.starts_with("/v1/messages") {
        return json!({"anyOf": [{"$ref": "#/components/schemas/MessagesError"}, common]});
    }
    common
}

/// Returns the `operationId` of a route, for example `post_v1_chat_completions`.
fn operation_id(route: &HttpRoute) -> String {
    let path = route.path.replace(|c: char| !c.is_ascii_alphanumeric(), "_");
    let parts: Vec<&str> = path.split('_').filter(|part| !part.is_empty()).collect();
    format!("{}_{}", route.method, parts.join("_"))
}

/// Returns the path parameters and, if `with_queries` is set, the query parameters of a route.
fn parameters(path: &str, with_queries: bool) -> Vec<Value> {
    let names = path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'));
    let in_path = |name: &str| {
        let name = name.trim_start_matches('*');
        json!({"name": name, "in": "path", "required": true, "schema": {"type": "string"}})
    };
    let queries = operations::queries(path).into_iter().filter(|_| with_queries);
    let in_query = |(name, schema): (&str, Value)| json!({"name": name, "in": "query", "required": false, "schema": schema});
    names.map(in_path).chain(queries.map(in_query)).collect()
}
