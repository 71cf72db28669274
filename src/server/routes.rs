//! The route table. Routing uses the parsed path only, never `Host`.

use super::absent::ABSENT;
use super::app::App;
use super::error::ApiError;
use super::keys::{Access, Door, Face, guard};
use super::observe::observe;
use super::openai::{chat, completions};
use super::{
    admin, debug, kv_events, loads, messages, metrics, models, openapi, probes, profile, responses,
    status, tokenisation,
};
use axum::Router;
use axum::handler::Handler;
use axum::http::StatusCode;
use axum::middleware::from_fn_with_state;
use axum::routing::{self, MethodRouter};
use std::sync::Arc;

/// Paths that are answered even when no connection is left for anything else.
pub const PROBE_PATHS: &[&str] = &["/livez", "/live", "/readyz", "/ready", "/health", "/ping"];

/// One method of one path.
pub struct Route {
    /// `get`, `post` or `delete`.
    pub method: &'static str,
    /// As axum writes it.
    pub path: &'static str,
    /// Who is let in.
    pub access: Access,
    handler: MethodRouter<Arc<App>>,
}

/// Every route there is; methods of one path stand together.
pub fn table() -> Vec<Route> {
    vec![
        get("/", status::page).to(Access::Open), // It asks for a key itself.
        post("/v1/chat/completions", chat::handle),
        post("/v1/completions", completions::handle),
        post("/v1/responses", responses::create),
        get("/v1/responses/{id}", responses::find),
        delete("/v1/responses/{id}", responses::delete),
        post("/v1/responses/{id}/cancel", responses::cancel),
        post("/v1/messages", messages::create),
        post("/v1/messages/count_tokens", messages::count_tokens),
        get("/v1/models", models::list),
        get("/v1/models/{*name}", models::one),
        post("/tokenize", tokenisation::tokenize),
        post("/v1/tokenize", tokenisation::tokenize),
        post("/detokenize", tokenisation::detokenize),
        post("/v1/detokenize", tokenisation::detokenize),
        get("/tokenizer_info", tokenisation::info),
        get("/livez", probes::live).to(Access::Open),
        get("/live", probes::live).to(Access::Open),
        get("/readyz", probes::ready).to(Access::Open),
        get("/ready", probes::ready).to(Access::Open),
        get("/health", probes::ready).to(Access::Open),
        get("/ping", probes::ready).to(Access::Open),
        post("/ping", probes::ready).to(Access::Open),
        get("/version", probes::version),
        get("/load", probes::load),
        get("/v1/loads", loads::loads),
        get("/loads", loads::loads),
        get("/metrics", metrics::page).to(Access::Metrics),
        get("/kv_event_sources", kv_events::sources),
        get("/server_info", admin::server_info),
        get("/openapi.json", openapi::serve),
        post("/reset_prefix_cache", admin::reset_prefix_cache).to(Access::Admin),
        post("/flush_cache", admin::reset_prefix_cache).to(Access::Admin),
        post("/abort_request", admin::abort_requests).to(Access::Admin),
        post("/abort_requests", admin::abort_requests).to(Access::Admin),
        get("/debug/experts", debug::experts).to(Access::Admin),
        get("/debug/kv", debug::kv).to(Access::Admin),
        get("/debug/steps", debug::steps).to(Access::Admin),
        post("/start_profile", profile::start).to(Access::Profile),
        post("/stop_profile", profile::stop).to(Access::Profile),
    ]
}

/// All routes over one state, as the public listener shows them.
pub fn router(app: Arc<App>) -> Router {
    build(app, Face::Public)
}

/// All routes over one state, as the listener of `--admin-listen` shows them.
pub fn admin_router(app: Arc<App>) -> Router {
    build(app, Face::Admin)
}

fn build(app: Arc<App>, face: Face) -> Router {
    let keyless = !app.options.keys.guard_clients();
    let door = |access| from_fn_with_state(Door { app: Arc::clone(&app), access, face }, guard);
    let mut table = table().into_iter().peekable();
    let mut router = Router::new();
    while let Some(Route { path, access, mut handler, .. }) = table.next() {
        while let Some(more) = table.next_if(|more| more.path == path) {
            handler = handler.merge(more.handler);
        }
        let handler = handler.fallback(async || method_not_allowed());
        // A guard that would let everyone in costs nothing.
        let open = access == Access::Open || access == Access::Key && keyless;
        let guarded = if open { handler } else { handler.layer(door(access)) };
        router = router.route(path, guarded);
    }
    for absent in ABSENT {
        for path in absent.paths {
            let told = routing::any(async || absent.refusal());
            router = router.route(path, told.layer(door(absent.access)));
        }
    }
    let unknown = routing::any(async || unknown_route()).layer(door(Access::Key));
    let cors = app.options.cors.as_ref().and_then(|cors| cors.layer().ok());
    let observed = from_fn_with_state(Arc::clone(&app), observe);
    let router = router.with_state(app).fallback_service(unknown).layer(observed);
    // Outermost: browsers must be able to read refusals, too.
    match cors {
        Some(cors) => router.layer(cors),
        None => router,
    }
}

fn method_not_allowed() -> ApiError {
    let message = "this route does not take this method";
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
}

/// 404: no route has this path, or none that is for this caller.
pub fn unknown_route() -> ApiError {
    ApiError::new(StatusCode::NOT_FOUND, "unknown_route", "there is no such route")
}

impl Route {
    fn to(self, access: Access) -> Self {
        Self { access, ..self }
    }
}

fn get<H, T>(path: &'static str, handler: H) -> Route
where
    H: Handler<T, Arc<App>>,
    T: 'static,
{
    Route { method: "get", path, access: Access::Key, handler: routing::get(handler) }
}

fn delete<H, T>(path: &'static str, handler: H) -> Route
where
    H: Handler<T, Arc<App>>,
    T: 'static,
{
    Route { method: "delete", path, access: Access::Key, handler: routing::delete(handler) }
}

fn post<H, T>(path: &'static str, handler: H) -> Route
where
    H: Handler<T, Arc<App>>,
    T: 'static,
{
    Route { method: "post", path, access: Access::Key, handler: routing::post(handler) }
}
