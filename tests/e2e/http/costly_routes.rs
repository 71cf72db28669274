//! Memory amplification of the routes besides tokenization and OpenAI's completions: costly bodies, and a check
//! that every route with a request body has one.

use super::memory_amplification::{
    ADMIN_KEY, BODY_BYTES, CostlyBody, OPENAI_BODIES, costly, longest, small_objects, try_body,
    user,
};
use serde_json::{Value, json};
use server::routes::table;
use std::collections::BTreeSet;
use std::fs;

/// Routes without a request body.
const WITHOUT_BODY: &[&str] = &[
    "/v1/responses/{id}/cancel",
    "/ping",
    "/reset_prefix_cache",
    "/flush_cache",
    "/start_profile",
    "/stop_profile",
];
/// Routes with the handler of another route.
const ALIASES: &[RouteAlias] = &[
    RouteAlias { path: "/v1/tokenize", of: "/tokenize" },
    RouteAlias { path: "/v1/detokenize", of: "/detokenize" },
    RouteAlias { path: "/embeddings", of: "/v1/embeddings" },
    RouteAlias { path: "/v1/score", of: "/score" },
    RouteAlias { path: "/v1/rerank", of: "/rerank" },
    RouteAlias { path: "/v2/rerank", of: "/rerank" },
    RouteAlias { path: "/abort_requests", of: "/abort_request" },
];

struct RouteAlias {
    path: &'static str,
    of: &'static str,
}

fn function() -> Value {
    json!({"type": "function", "name": "f", "parameters": {"type": "object", "x": small_objects()}})
}

/// Input items of Responses and Conversations: as many short messages as a body may contain.
fn short_items() -> Value {
    json!(vec![json!({"role": "user", "content": "a"}); 60_000])
}

fn responses() -> Vec<CostlyBody> {
    let schema = json!({"type": "object", "x": small_objects()});
    let format = json!({"format": {"type": "json_schema", "name": "x", "schema": schema}});
    let path = "/v1/responses";
    vec![
        costly("short items", path, 1_500, &[400, 429], json!({"input": short_items()})),
        costly(
            "tools of small objects",
            path,
            1_000,
            &[200, 400, 429],
            json!({"input": "a", "tools": [function()], "max_output_tokens": 16}),
        ),
        costly(
            "a schema of small objects",
            path,
            600,
            &[400],
            json!({"input": "a", "text": format, "max_output_tokens": 16}),
        ),
    ]
}

fn conversations() -> Vec<CostlyBody> {
    let long = json!([{"role": "user", "content": longest("x")}]);
    let metadata = json!({"metadata": {"x": small_objects()}});
    vec![
        costly(
            "short items",
            "/v1/conversations",
            1_500,
            &[200, 400],
            json!({"items": short_items()}),
        ),
        costly("a long item", "/v1/conversations", 40, &[200], json!({"items": long})),
        costly("metadata", "/v1/conversations/{id}", 300, &[400], metadata),
        costly(
            "short items",
            "/v1/conversations/{id}/items",
            1_500,
            &[200, 400],
            json!({"items": short_items()}),
        ),
    ]
}

fn messages() -> Vec<CostlyBody> {
    let tool = json!({"name": "f", "input_schema": {"type": "object", "x": small_objects()}});
    let path = "/v1/messages";
    let run = json!({"messages": user("x".repeat(BODY_BYTES)), "max_tokens": 1});
    let tools = json!({"messages": user("a"), "tools": [tool], "max_tokens": 1});
    let turn = |index: usize| {
        let role = if index.is_multiple_of(2) { "user" } else { "assistant" };
        json!({"role": role, "content": "a"})
    };
    let turns: Vec<Value> = (0..80_000).map(turn).collect();
    let turns = json!({"messages": turns, "max_tokens": 1});
    let stops = vec!["z".repeat(1_024); 128];
    let stops = json!({"messages": user("a"), "stop_sequences": stops, "max_tokens": 16});
    vec![
        costly("short messages", path, 200, &[400, 429], turns),
        costly("stop sequences", path, 400, &[200], stops),
        costly("a run", path, 30, &[400], run),
        costly("tools of small objects", path, 1_000, &[200, 400, 429], tools),
    ]
}

fn generations() -> Vec<CostlyBody> {
    let path = "/generate";
    let ids = vec![7_u32; BODY_BYTES / 2];
    let schema = json!({"type": "object", "x": small_objects()}).to_string();
    let limited = json!({"text": "a", "sampling_params": {"json_schema": schema}});
    vec![
        costly("a run", path, 20, &[400], json!({"text": "x".repeat(BODY_BYTES)})),
        costly("ids", path, 40, &[400], json!({"input_ids": ids})),
        costly("a schema of small objects", path, 600, &[400], limited),
    ]
}

/// Bodies of the routes that return token ids and parameters. Each prompt of a completion repeats the
/// parameters in the reply.
fn renders() -> Vec<CostlyBody> {
    let biases: serde_json::Map<String, Value> =
        (0..250).map(|id| (id.to_string(), json!(0.125))).collect();
    let allowed: Vec<u32> = (0..250).collect();
    let stops = vec!["z".repeat(256); 16];
    let repeated = json!({"prompt": vec!["a"; 256], "logit_bias": biases, "stop": stops,
                          "allowed_token_ids": allowed});
    let cut = json!({"prompt": "x".repeat(BODY_BYTES), "truncate_prompt_tokens": 16});
    let values = json!({"messages": user("a"), "chat_template_kwargs": {"x": small_objects()}});
    vec![
        costly("repeated parameters", "/v1/completions/render", 4_000, &[200], repeated),
        costly("a run to be cut", "/v1/completions/render", 260, &[200, 429], cut),
        costly("many values", "/v1/chat/completions/render", 400, &[200, 400], values),
    ]
}

/// The body of an admin route, whose key each request has.
fn abort() -> CostlyBody {
    let ids = vec!["x".repeat(90); 10_000];
    let body = json!({"request_ids": ids});
    costly("request ids", "/abort_request", 60, &[200], body)
        .with_flags(&["--admin-key", ADMIN_KEY])
}

fn embeddings() -> Vec<CostlyBody> {
    const FLAGS: &[&str] = &["--runner", "pooling"];
    let path = "/v1/embeddings";
    let texts = vec!["a1".repeat(700); 2_048];
    let bodies = [
        costly("a run", path, 260, &[200, 400, 429], json!({"input": "x".repeat(BODY_BYTES)})),
        costly("ids", path, 40, &[400], json!({"input": vec![7_u32; BODY_BYTES / 2]})),
        costly(
            "texts, cut",
            path,
            1_000,
            &[200, 429],
            json!({"input": texts, "truncate_prompt_tokens": 16}),
        ),
    ];
    bodies.into_iter().map(|body| body.with_flags(FLAGS)).collect()
}

fn bodies() -> Vec<CostlyBody> {
    let mut all = [responses(), conversations(), messages(), generations(), renders()].concat();
    all.push(abort());
    all
}

/// Returns the costly bodies of all routes.
fn all_bodies() -> Vec<CostlyBody> {
    let of_others = OPENAI_BODIES.iter().flat_map(|bodies| bodies());
    of_others.chain(bodies()).chain(embeddings()).collect()
}

#[test]
fn every_route_with_a_body_has_a_costly_one() {
    let routes: BTreeSet<&str> =
        table().iter().filter(|route| route.method == "post").map(|route| route.path).collect();
    let tried: BTreeSet<&str> = all_bodies().into_iter().map(|body| body.path).collect();
    let exempt = WITHOUT_BODY.iter().copied().chain(ALIASES.iter().map(|alias| alias.path));
    let covered: BTreeSet<&str> = tried.iter().copied().chain(exempt).collect();
    assert_eq!(routes, covered, "routes of server/src/routes.rs and paths of costly bodies");
    let missing: Vec<&str> =
        ALIASES.iter().map(|alias| alias.of).filter(|path| !tried.contains(path)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

/// A row of the table of routes in docs/operations.md.
struct DocumentedRoute {
    paths: Vec<String>,
    /// Name of the worst body; empty = the route reads no body.
    body: String,
    /// Measured memory in bytes per byte of the body.
    measured: Option<u64>,
    /// Maximum memory in bytes per byte of the body, which the test of the body checks.
    bound: Option<u64>,
}

/// Returns the rows of the table of routes in docs/operations.md.
fn documented_routes() -> Vec<DocumentedRoute> {
    const HEADING: &str = "### Worst-case body of each route\n";
    let page = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/operations.md"));
    let page = page.unwrap();
    let section = page.split_once(HEADING).expect("the heading of the table").1;
    let section = section.split("\n#").next().unwrap();
    let row = |line: &str| {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [paths, body, measured, bound, _limit] = cells[..] else { panic!("{line}") };
        let paths = paths.split('`').filter(|path| path.starts_with('/')).map(str::to_owned);
        let number = |cell: &str| cell.replace(',', "").parse().ok();
        let (measured, bound, body) = (number(measured), number(bound), body.to_owned());
        DocumentedRoute { paths: paths.collect(), body, measured, bound }
    };
    section.lines().filter(|line| line.starts_with("| `/")).map(row).collect()
}

#[test]
fn every_route_has_a_documented_worst_body() {
    let (rows, all) = (documented_routes(), all_bodies());
    let routes = table().into_iter().filter(|route| route.method == "post");
    let mut routes: Vec<&str> = routes.map(|route| route.path).collect();
    let mut documented: Vec<&str> =
        rows.iter().flat_map(|row| &row.paths).map(|p| &p[..]).collect();
    routes.sort_unstable();
    documented.sort_unstable();
    assert_eq!(routes, documented, "POST routes, and the rows of docs/operations.md");
    for DocumentedRoute { paths, body, measured, bound } in &rows {
        if body.is_empty() {
            assert!(paths.iter().all(|path| WITHOUT_BODY.contains(&&path[..])), "{paths:?}");
            continue;
        }
        let tried = all.iter().find(|of| of.path == paths[0] && of.name == body);
        let factor = tried.unwrap_or_else(|| panic!("{paths:?}: no test of {body:?}")).factor;
        assert_eq!(*bound, Some(factor), "{paths:?}: bound of the test of {body:?}");
        assert!(measured.is_some_and(|measured| measured <= factor), "{paths:?}: {measured:?}");
    }
}

#[test]
fn responses_and_conversations_stay_within_the_memory_bound() {
    responses().iter().chain(&conversations()).for_each(try_body);
}

#[test]
fn messages_and_generations_stay_within_the_memory_bound() {
    messages().iter().chain(&generations()).for_each(try_body);
}

#[test]
fn renders_and_aborts_stay_within_the_memory_bound() {
    renders().iter().chain([&abort()]).for_each(try_body);
}

#[test]
fn embeddings_stay_within_the_memory_bound() {
    embeddings().iter().for_each(try_body);
}
