//! Several replicas in one server: request routing, and the metrics of each replica.

use crate::http_client::{HttpClient, get, post};
use crate::kv_event_replay;
use crate::test_server::{BLOCK_TOKENS, ServerSetup, TestServer};
use metrics::kv_events::decode;
use serde_json::{Value, json};
use server::{ApiKeys, ServerOptions};
use std::collections::BTreeSet;
use std::time::Duration;

fn two() -> ServerSetup {
    ServerSetup { replicas: 2, ..ServerSetup::default() }
}

/// Number of tokens that each replica has generated.
fn generated(server: &TestServer) -> Vec<u64> {
    server.wait_idle(Duration::from_secs(5));
    server.client().replica_stats().iter().map(|stats| stats.generated_tokens_total).collect()
}

/// Requests five output tokens after a prompt of 40 equal tokens `letter`; returns the number of cached
/// prompt tokens.
fn complete(server: &TestServer, letter: u32, more: &Value) -> u64 {
    let mut body = json!({"prompt": vec![letter; 40], "max_tokens": 5, "ignore_eos": true});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let reply = post(server.address, "/v1/completions", &body);
    assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
    reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

#[test]
fn requests_are_balanced_by_prefix_hits() {
    let server = TestServer::start(&two());
    for letter in 65..69 {
        assert_eq!(complete(&server, letter, &json!({})), 0);
    }
    assert_eq!(generated(&server), [10, 10], "equals take turns");
    let blocks = u64::from(40 / BLOCK_TOKENS * BLOCK_TOKENS);
    for letter in [65, 65, 65, 68] {
        assert_eq!(complete(&server, letter, &json!({})), blocks, "where its prefix lies");
    }
    assert_eq!(generated(&server), [25, 15]);
}

#[test]
fn data_parallel_rank_pins_the_replica() {
    let server = TestServer::start(&two());
    for _ in 0..3 {
        complete(&server, 65, &json!({"data_parallel_rank": 1}));
    }
    assert_eq!(generated(&server), [0, 15]);
    let body = json!({"prompt": vec![65; 40], "max_tokens": 5, "ignore_eos": true}).to_string();
    let pinned = |rank: &str| {
        let mut client = HttpClient::connect(server.address);
        let header = format!("X-data-parallel-rank: {rank}\r\n");
        client.send("POST", "/v1/completions", &header, body.as_bytes());
        client.read().unwrap()
    };
    assert_eq!(pinned("0").status, 200, "although the other one has the prefix");
    assert_eq!(generated(&server), [5, 15]);
    let rejected = [
        pinned("2"),
        post(server.address, "/v1/completions", &{
            let mut body: Value = serde_json::from_str(&body).unwrap();
            body["data_parallel_rank"] = 2.into();
            body
        }),
    ];
    for reply in rejected {
        let error = &reply.json()["error"];
        assert_eq!((reply.status, &error["param"]), (400, &json!("data_parallel_rank")), "{error}");
    }
}

#[test]
fn replicas_are_reported_separately() {
    let options =
        ServerOptions { api_keys: ApiKeys::new([], ["root"]), ..ServerOptions::default() };
    let kv_events = Some(kv_event_replay::config(&json!({"topic": "kv@{dp_rank}"})));
    let setup = ServerSetup { options, kv_events, ..two() };
    let server = TestServer::start(&setup);
    for rank in [0, 1, 1] {
        complete(&server, 65 + rank, &json!({"data_parallel_rank": rank}));
    }
    server.wait_idle(Duration::from_secs(5));
    let at = server.address;

    let loads = get(at, "/v1/loads").json();
    assert_eq!(loads["dp_rank_count"], 2);
    let ranks = loads["loads"].as_array().unwrap().iter().map(|load| &load["dp_rank"]);
    assert_eq!(ranks.collect::<Vec<_>>(), [0, 1]);
    let one = get(at, "/v1/loads?dp_rank=1").json();
    assert_eq!(
        (one["loads"].as_array().unwrap().len(), &one["loads"][0]["dp_rank"]),
        (1, &json!(1))
    );

    let page = String::from_utf8(get(at, "/metrics").body).unwrap();
    for series in [
        r#"vllm:generation_tokens_total{engine="1",model_name="tiny"} 10"#,
        r#"vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"} 1"#,
        r#"vllm:request_success_total{engine="1",finished_reason="length",model_name="tiny"} 2"#,
        r#"hadron:executor_up{engine="1",model_name="tiny",rank="1"} 1"#,
    ] {
        assert!(page.contains(&format!("{series}\n")), "{series}: {page}");
    }

    let mut client = HttpClient::connect(at);
    client.send("GET", "/debug/kv", "Authorization: Bearer root\r\n", b"");
    let kv = client.read().unwrap().json();
    let resident = |rank: usize| -> BTreeSet<String> {
        let hashes = kv["replicas"][rank]["resident"].as_array().unwrap();
        hashes.iter().map(|hash| hash.as_str().unwrap().to_owned()).collect()
    };
    assert!(resident(0).is_disjoint(&resident(1)) && !resident(0).is_empty(), "{kv}");

    let sources = get(at, "/kv_event_sources").json();
    for rank in [0, 1] {
        let source = &sources[rank.to_string()];
        assert_eq!(
            (&source["data_parallel_rank"], &source["topic"]),
            (&json!(rank), &json!(format!("kv@{rank}")))
        );
        assert_eq!(source["sequence_start"], "clock");
        let start = source["epoch"].as_u64().unwrap();
        let batches =
            kv_event_replay::replay(source["replay_endpoint"].as_str().unwrap(), start, 20_000);
        let payloads: Vec<_> =
            batches.iter().map(|(_, payload)| decode(payload).unwrap()).collect();
        assert!(payloads.len() > 1, "a clear, and blocks");
        assert!(
            payloads.iter().all(|payload| payload.data_parallel_rank == Some(rank as u32)),
            "{rank}"
        );
    }
}
