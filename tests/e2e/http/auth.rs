//! Access control: client and admin keys, the admin listener, and cross-origin browsers.

use super::server_process::{ServerProcess, command};
use crate::bounded_child::run_to_end;
use crate::http_client::{HttpClient, HttpReply, get, post};
use crate::test_server::{ServerSetup, TestServer};
use serde_json::{Value, json};
use server::routes::table;
use server::{ApiKeys, CorsConfig, RouteAccess, ServerOptions, UNSUPPORTED_ROUTES};
use std::collections::BTreeSet;
use std::net::{SocketAddr, TcpListener};

/// Sends a request with any method and path; the body is an empty JSON object.
fn send(at: SocketAddr, method: &str, path: &str, headers: &str) -> HttpReply {
    let mut client = HttpClient::connect(at);
    client.send(method, path, headers, b"{}");
    client.read().unwrap()
}

fn bearer(key: &str) -> String {
    format!("Authorization: Bearer {key}\r\n")
}

fn reason(reply: &HttpReply) -> Value {
    reply.json()["error"]["reason"].clone()
}

fn with(options: ServerOptions) -> TestServer {
    TestServer::start(&ServerSetup { options, ..ServerSetup::default() })
}

/// A path that matches the route pattern `path`.
fn example(path: &str) -> String {
    path.replace("{*name}", "tiny").replace("{id}", "tiny").replace("{item_id}", "tiny")
}

#[test]
fn every_route_but_probes_requires_the_api_key() {
    let keys = ApiKeys::new(["one", "two"], ["root"]);
    let server =
        with(ServerOptions { api_keys: keys, tokenizer_info: true, ..ServerOptions::default() });
    let at = server.address;
    let is_open = |access| matches!(access, RouteAccess::Open | RouteAccess::Metrics);
    let open = table().into_iter().filter(|route| is_open(route.access)).map(|route| route.path);
    let open: BTreeSet<&str> = open.collect();
    // These routes need no key. The status page `/` lets the user enter the key in the browser, and `/docs`
    // contains no data.
    let probes = ["/health", "/health_generate", "/live", "/livez", "/ping", "/ready", "/readyz"];
    let known: BTreeSet<&str> = probes.into_iter().chain(["/", "/docs", "/metrics"]).collect();
    assert_eq!(open, known);
    for route in table() {
        let (method, path) = (route.method.to_uppercase(), example(route.path));
        let ask = |headers: &str| send(at, &method, &path, headers);
        // `/v1/messages` has a different error format, which `anthropic.rs` tests.
        if path.starts_with("/v1/messages") {
            assert_eq!((ask("").status, ask(&bearer("three")).status), (401, 401), "{path}");
            assert_ne!(ask(&bearer("one")).status, 401, "{path}");
            continue;
        }
        let missing = ask("");
        if is_open(route.access) {
            assert_eq!(missing.status, 200, "{path}");
            continue;
        }
        assert_eq!((missing.status, reason(&missing)), (401, json!("missing_key")), "{path}");
        assert_eq!(missing.header("www-authenticate"), Some("Bearer"), "{path}");
        for wrong in [&bearer("three"), &bearer("on"), "x-api-key: tw\r\n"] {
            let reply = ask(wrong);
            assert_eq!((reply.status, reason(&reply)), (401, json!("wrong_key")), "{path}");
            assert_eq!(reply.json()["error"]["type"], "AuthenticationError");
        }
        for right in [bearer("one"), bearer("two"), "x-api-key: two\r\n".to_owned()] {
            let reply = ask(&right);
            let hidden = matches!(route.access, RouteAccess::Admin | RouteAccess::Profile);
            assert_eq!(reply.status == 404 && reason(&reply) == "unknown_route", hidden, "{path}");
            assert_ne!(reply.status, 401, "{path}");
        }
        let reply = ask(&bearer("root"));
        assert!(reply.status != 401 && reason_or_null(&reply) != "unknown_route", "{path}");
    }
    let unknown = send(at, "GET", "/nowhere", "");
    assert_eq!((unknown.status, reason(&unknown)), (401, json!("missing_key")));
    assert_eq!(send(at, "GET", "/nowhere", &bearer("one")).status, 404);
    assert_eq!(send(at, "OPTIONS", "/v1/completions", "").status, 405, "browsers ask first");
    let mut client = HttpClient::connect(at);
    client.send_raw(b"GET /v1/models HTTP/1.1\r\nHost: livez\r\n\r\n").unwrap();
    assert_eq!(client.read().unwrap().status, 401, "Host decides nothing");
    let mut client = HttpClient::connect(at);
    client.send_raw(b"GET /v1/models HTTP/1.1\r\nHost: x/livez\r\n\r\n").unwrap();
    assert_eq!(client.read().unwrap().status, 400, "a Host is no path");
}

#[test]
fn unsupported_routes_require_the_same_access() {
    let keys = ApiKeys::new(["one"], ["root"]);
    let server = with(ServerOptions { api_keys: keys, ..ServerOptions::default() });
    for absent in UNSUPPORTED_ROUTES {
        for path in absent.paths {
            let told = |headers: &str| {
                let reply = send(server.address, "POST", path, headers);
                (reply.status, reason(&reply))
            };
            assert_eq!(told(""), (401, json!("missing_key")), "{path}");
            let known = (501, json!("not_implemented"));
            let client = match absent.access {
                RouteAccess::Admin => (404, json!("unknown_route")),
                _ => known.clone(),
            };
            assert_eq!(told(&bearer("one")), client, "{path}");
            assert_eq!(told(&bearer("root")), known, "{path}");
        }
    }
}

/// Rejection reason of a reply; null for other replies.
fn reason_or_null(reply: &HttpReply) -> Value {
    let body: Value = serde_json::from_slice(&reply.body).unwrap_or_default();
    body["error"]["reason"].clone()
}

#[test]
fn path_spellings_do_not_bypass_auth() {
    let keys = ApiKeys::new(["one"], ["root"]);
    let server = with(ServerOptions { api_keys: keys, ..ServerOptions::default() });
    for path in [
        "/v1/models/",
        "//v1/models",
        "/V1/models",
        "/v1%2Fmodels",
        "/livez/../v1/models",
        "/livez/",
        "/v1/models?key=one",
        "/reset_prefix_cache/",
        "/reset%5Fprefix_cache",
    ] {
        let reply = send(server.address, "GET", path, "");
        assert_eq!((reply.status, reason(&reply)), (401, json!("missing_key")), "{path}");
        let reply = send(server.address, "POST", path, &bearer("one"));
        assert_ne!(reply.status, 200, "{path}");
    }
}

#[test]
fn admin_routes_need_an_admin_key_or_listener() {
    let server = with(ServerOptions::default());
    for route in table().into_iter().filter(|route| route.access == RouteAccess::Admin) {
        for method in [&route.method.to_uppercase(), "PUT", "OPTIONS"] {
            for headers in ["", &bearer("x")] {
                let reply = send(server.address, method, route.path, headers);
                assert_eq!(
                    (reply.status, reason(&reply)),
                    (404, json!("unknown_route")),
                    "{}",
                    route.path
                );
            }
        }
    }
    assert_eq!(get(server.address, "/server_info").json(), json!({"version": "test"}));
}

#[test]
fn admin_listener_and_key_open_admin_routes() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let admin = free.local_addr().unwrap();
    drop(free);
    let address = admin.to_string();
    let args = ["--admin-listen", &address, "--threads", "1", "--api-key", "k"];
    let process = ServerProcess::start(&args);
    let reset = "/reset_prefix_cache";
    assert_eq!(send(process.address, "POST", reset, &bearer("k")).status, 404);
    assert_eq!(send(admin, "POST", reset, "").status, 401);
    assert_eq!(send(admin, "POST", reset, &bearer("k")).json(), json!({"success": true}));
    assert_eq!(get(admin, "/readyz").status, 200);
    let info = send(process.address, "GET", "/server_info", &bearer("k")).json();
    assert_eq!(info["flags"]["api-key"], json!(1), "how many, not which: {info}");
    assert_eq!(info["flags"]["admin-listen"], json!(address));
    assert_eq!(info["flags"]["block-size"], json!(16));
    assert!(info["engine"]["max_num_seqs"].as_u64().unwrap() > 0);
    assert_eq!(info["engine"]["device"], json!("cpu"));
    assert!(info["engine"]["num_gpu_blocks"].as_u64().unwrap() > 0);
}

#[test]
fn api_keys_are_read_from_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("keys");
    let path = file.to_str().unwrap();
    let rejected = |because: &str| {
        let output = run_to_end(&mut command(&["--port", "0", "--api-key-file", path]));
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(text.contains(because) && text.contains("--api-key-file"), "{text}");
    };
    rejected("No such file");
    std::fs::write(&file, "# nobody yet\n\n").unwrap();
    rejected("contains no key");
    std::fs::write(&file, "# ours\nfirst\n\n  second  \n").unwrap();
    let process = ServerProcess::start(&["--api-key-file", path, "--threads", "1"]);
    for (key, status) in [("first", 200), ("second", 200), ("# ours", 401), ("third", 401)] {
        assert_eq!(
            send(process.address, "GET", "/v1/models", &bearer(key)).status,
            status,
            "{key}"
        );
    }
    let body = json!({"prompt": "a", "max_tokens": 1});
    assert_eq!(post(process.address, "/v1/completions", &body).status, 401);
}

#[test]
fn cors_is_allowed_only_where_configured() {
    let origin = "Origin: https://a.example\r\n";
    let preflight = format!("{origin}Access-Control-Request-Method: POST\r\n");
    let closed = with(ServerOptions::default());
    assert_eq!(
        send(closed.address, "GET", "/v1/models", origin).header("access-control-allow-origin"),
        None
    );

    let origins = vec!["https://a.example".to_owned()];
    let cors = CorsConfig { origins, methods: vec![], headers: vec![], credentials: false };
    let keys = ApiKeys::new(["one"], []);
    let server =
        with(ServerOptions { cors: Some(cors), api_keys: keys, ..ServerOptions::default() });
    let asked = send(server.address, "OPTIONS", "/v1/completions", &preflight);
    assert_eq!(asked.status, 200);
    assert_eq!(asked.header("access-control-allow-origin"), Some("https://a.example"));
    assert!(asked.header("access-control-allow-headers").unwrap().contains("authorization"));
    let rejected = send(server.address, "GET", "/v1/models", origin);
    assert_eq!(rejected.status, 401);
    assert_eq!(
        rejected.header("access-control-allow-origin"),
        Some("https://a.example"),
        "readable"
    );
    let other = "Origin: https://b.example\r\n";
    assert_eq!(
        send(server.address, "GET", "/v1/models", other).header("access-control-allow-origin"),
        None
    );
}
