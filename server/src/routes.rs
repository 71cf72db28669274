//! Route table and router. Requests are routed by the parsed path only, never by `Host`.

use super::access_log::record_requests;
use super::api_error::ApiError;
use super::app::AppState;
use super::auth::{ListenerKind, RouteAccess, RouteAuthParams, authorize};
use super::metrics_middleware::count_requests;
use super::openai::{chat, completions};
use super::runner_guard::{RequiredRunner, RunnerType, check_runner};
use super::unsupported_routes::UNSUPPORTED_ROUTES;
use super::{
    admin, anthropic, conversations, debug, docs_page, kv_event_sources, loads, metrics, models,
    openapi, pooling, probes, profile, render, responses, sglang, status_page, tokenize,
};
use axum::Router;
use axum::handler::Handler;
use axum::http::StatusCode;
use axum::middleware::from_fn_with_state;
use axum::routing::{self, MethodRouter};
use std::sync::Arc;

/// Paths that are served even when the connection limit is reached.
pub const PROBE_PATHS: &[&str] = &["/livez", "/live", "/readyz", "/ready", "/health", "/ping"];

/// Route of the server: one HTTP method of one path.
pub struct HttpRoute {
    /// `get`, `post` or `delete`.
    pub method: &'static str,
    /// Path in axum's route syntax.
    pub path: &'static str,
    /// API key required by the route.
    pub access: RouteAccess,
    /// Runner (`--runner`) with which the route is served; `None` = any runner.
    pub runner: Option<RunnerType>,
    handler: MethodRouter<Arc<AppState>>,
}

/// Returns all routes of the server; routes with the same path are adjacent.
pub fn table() -> Vec<HttpRoute> {
    vec![
        get("/", status_page::page).with_access(RouteAccess::Open), // The page itself prompts for a key.
        post("/v1/chat/completions", chat::handle).with_runner(RunnerType::Generate),
        post("/v1/completions", completions::handle).with_runner(RunnerType::Generate),
        post("/v1/embeddings", pooling::embeddings).with_runner(RunnerType::Pooling),
        post("/embeddings", pooling::embeddings).with_runner(RunnerType::Pooling),
        post("/score", pooling::score).with_runner(RunnerType::Pooling),
        post("/v1/score", pooling::score).with_runner(RunnerType::Pooling),
        post("/rerank", pooling::rerank).with_runner(RunnerType::Pooling),
        post("/v1/rerank", pooling::rerank).with_runner(RunnerType::Pooling),
        post("/v2/rerank", pooling::rerank).with_runner(RunnerType::Pooling),
        post("/v1/chat/completions/render", render::chat),
        post("/v1/completions/render", render::completions),
        post("/generate", sglang::generate).with_runner(RunnerType::Generate),
        post("/v1/responses", responses::create).with_runner(RunnerType::Generate),
        get("/v1/responses/{id}", responses::retrieve),
        delete("/v1/responses/{id}", responses::delete),
        get("/v1/responses/{id}/input_items", responses::list_input_items),
        post("/v1/responses/{id}/cancel", responses::cancel),
        post("/v1/conversations", conversations::create),
        get("/v1/conversations/{id}", conversations::retrieve),
        post("/v1/conversations/{id}", conversations::update),
        delete("/v1/conversations/{id}", conversations::delete),
        post("/v1/conversations/{id}/items", conversations::create_items),
        get("/v1/conversations/{id}/items", conversations::list_items),
        get("/v1/conversations/{id}/items/{item_id}", conversations::retrieve_item),
        delete("/v1/conversations/{id}/items/{item_id}", conversations::delete_item),
        post("/v1/messages", anthropic::create).with_runner(RunnerType::Generate),
        post("/v1/messages/count_tokens", anthropic::count_tokens),
        get("/v1/models", models::list),
        get("/v1/models/{*name}", models::retrieve),
        post("/tokenize", tokenize::tokenize),
        post("/v1/tokenize", tokenize::tokenize),
        post("/detokenize", tokenize::detokenize),
        post("/v1/detokenize", tokenize::detokenize),
        get("/tokenizer_info", tokenize::info),
        get("/livez", probes::live).with_access(RouteAccess::Open),
        get("/live", probes::live).with_access(RouteAccess::Open),
        get("/readyz", probes::ready).with_access(RouteAccess::Open),
        get("/ready", probes::ready).with_access(RouteAccess::Open),
        get("/health", probes::ready).with_access(RouteAccess::Open),
        get("/ping", probes::ready).with_access(RouteAccess::Open),
        post("/ping", probes::ready).with_access(RouteAccess::Open),
        get("/health_generate", sglang::health_generate).with_access(RouteAccess::Open),
        get("/version", probes::version),
        get("/load", probes::load),
        get("/v1/loads", loads::loads),
        get("/loads", loads::loads),
        get("/metrics", metrics::page).with_access(RouteAccess::Metrics),
        get("/kv_event_sources", kv_event_sources::sources),
        get("/server_info", admin::server_info),
        get("/get_server_info", admin::server_info),
        get("/model_info", sglang::model_info),
        get("/get_model_info", sglang::model_info),
        get("/docs", docs_page::page).with_access(RouteAccess::Open),
        get("/openapi.json", openapi::serve),
        post("/reset_prefix_cache", admin::reset_prefix_cache).with_access(RouteAccess::Admin),
        post("/flush_cache", admin::reset_prefix_cache).with_access(RouteAccess::Admin),
        post("/abort_request", admin::abort_requests).with_access(RouteAccess::Admin),
        post("/abort_requests", admin::abort_requests).with_access(RouteAccess::Admin),
        get("/debug/experts", debug::experts).with_access(RouteAccess::Admin),
        get("/debug/kv", debug::kv).with_access(RouteAccess::Admin),
        get("/debug/steps", debug::steps).with_access(RouteAccess::Admin),
        post("/start_profile", profile::start).with_access(RouteAccess::Profile),
        post("/stop_profile", profile::stop).with_access(RouteAccess::Profile),
    ]
}

/// Builds the router of the public listener.
pub fn router(app: Arc<AppState>) -> Router {
    build(app, ListenerKind::Public)
}

/// Builds the router of the admin listener (`--admin-listen`).
pub fn admin_router(app: Arc<AppState>) -> Router {
    build(app, ListenerKind::Admin)
}

/// Merges adjacent routes with the same path into one route whose handler replies 405 to unsupported methods.
fn routes_by_path() -> impl Iterator<Item = HttpRoute> {
    let mut routes = table().into_iter().peekable();
    std::iter::from_fn(move || {
        let mut route = routes.next()?;
        while let Some(more) = routes.next_if(|more| more.path == route.path) {
            route.handler = route.handler.merge(more.handler);
        }
        let handler = route.handler.fallback(async || method_not_allowed());
        Some(HttpRoute { handler, ..route })
    })
}

/// Builds the router of one listener.
fn build(app: Arc<AppState>, listener: ListenerKind) -> Router {
    let no_client_keys = !app.options.api_keys.requires_client_key();
    let guard = |access| {
        from_fn_with_state(RouteAuthParams { app: Arc::clone(&app), access, listener }, authorize)
    };
    let mut router = Router::new();
    for HttpRoute { path, access, runner, handler, .. } in routes_by_path() {
        let handler = match runner {
            Some(runner) => {
                let guard = RequiredRunner { app: Arc::clone(&app), runner };
                handler.layer(from_fn_with_state(guard, check_runner))
            }
            None => handler,
        };
        // A route that requires no API key gets no authentication middleware.
        let open = access == RouteAccess::Open || access == RouteAccess::Key && no_client_keys;
        let guarded_handler = if open { handler } else { handler.layer(guard(access)) };
        router = router.route(path, guarded_handler);
    }
    for unsupported in UNSUPPORTED_ROUTES {
        for path in unsupported.paths {
            let handler = routing::any(async || unsupported.not_implemented());
            router = router.route(path, handler.layer(guard(unsupported.access)));
        }
    }
    let unknown = routing::any(async || unknown_route()).layer(guard(RouteAccess::Key));
    let cors = app.options.cors.as_ref().and_then(|cors| cors.layer().ok());
    let observed = from_fn_with_state(Arc::clone(&app), count_requests);
    let recorded = (app.options.log_requests || app.options.spans.is_some())
        .then(|| from_fn_with_state(Arc::clone(&app), record_requests));
    let mut router = router.with_state(app).fallback_service(unknown).layer(observed);
    if let Some(recorded) = recorded {
        router = router.layer(recorded);
    }
    // CORS is the outermost layer, so that browsers can read error replies too.
    match cors {
        Some(cors) => router.layer(cors),
        None => router,
    }
}

fn method_not_allowed() -> ApiError {
    let message = "this route does not support this method";
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
}

/// Creates the 404 error: no route has this path, or the caller is not allowed to use the route.
pub fn unknown_route() -> ApiError {
    ApiError::new(StatusCode::NOT_FOUND, "unknown_route", "no route has this path")
}

impl HttpRoute {
    fn with_access(self, access: RouteAccess) -> Self {
        Self { access, ..self }
    }

    fn with_runner(self, runner: RunnerType) -> Self {
        Self { runner: Some(runner), ..self }
    }
}

/// Creates a route that requires a client key and is served with any `--runner`.
fn route(
    method: &'static str,
    path: &'static str,
    handler: MethodRouter<Arc<AppState>>,
) -> HttpRoute {
    HttpRoute { method, path, access: RouteAccess::Key, runner: None, handler }
}

fn get<H, T>(path: &'static str, handler: H) -> HttpRoute
where
    H: Handler<T, Arc<AppState>>,
    T: 'static,
{
    route("get", path, routing::get(handler))
}

fn delete<H, T>(path: &'static str, handler: H) -> HttpRoute
where
    H: Handler<T, Arc<AppState>>,
    T: 'static,
{
    route("delete", path, routing::delete(handler))
}

fn post<H, T>(path: &'static str, handler: H) -> HttpRoute
where
    H: Handler<T, Arc<AppState>>,
    T: 'static,
{
    route("post", path, routing::post(handler))
}
