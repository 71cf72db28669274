//! Embeddings, scores and reranking over real sockets, with a mock executor (hash model) that computes
//! vectors by hashing the tokens.

use crate::hash_model::text::{POOLED_WIDTH, pooled, pooling_hash};
use crate::http_client::{HttpClient, HttpReply, get, post};
use crate::test_server::{ServerSetup, TestServer};
use engine::AdmissionLimits;
use protocol::PoolingMethod;
use serde_json::{Value, json};
use server::pooling::{MatryoshkaDimensions, PoolerSettings, PoolingTask};
use std::time::{Duration, Instant};

/// An embedding model whose embeddings may be shortened.
fn embedder() -> PoolerSettings {
    PoolerSettings {
        task: PoolingTask::Embed,
        method: PoolingMethod::LastToken,
        hidden_size: POOLED_WIDTH as u32,
        use_activation: true,
        dimensions: None,
        matryoshka: MatryoshkaDimensions::Any,
        has_pair_template: false,
    }
}

/// A reranker that compares the log-probabilities of two tokens.
fn reranker() -> PoolerSettings {
    let method = PoolingMethod::TokenLogprobs(vec![110, 121]);
    PoolerSettings {
        task: PoolingTask::Score,
        method,
        matryoshka: MatryoshkaDimensions::Unsupported,
        ..embedder()
    }
}

fn start(pooler: PoolerSettings) -> TestServer {
    TestServer::start(&ServerSetup { pooler: Some(pooler), ..ServerSetup::default() })
}

fn ok(server: &TestServer, path: &str, body: &Value) -> Value {
    let reply = post(server.address, path, body);
    assert_eq!(reply.status, 200, "{body}: {}", String::from_utf8_lossy(&reply.body));
    reply.json()
}

/// Parses a JSON list of numbers.
fn floats(list: &Value) -> Vec<f32> {
    let list = list.as_array().unwrap_or_else(|| panic!("{list}"));
    list.iter().map(|value| value.as_f64().unwrap() as f32).collect()
}

/// Embeddings of a reply, in order.
fn embeddings(reply: &Value) -> Vec<Vec<f32>> {
    reply["data"].as_array().unwrap().iter().map(|item| floats(&item["embedding"])).collect()
}

fn ids_of(server: &TestServer, text: &str) -> Vec<u32> {
    let reply = ok(server, "/tokenize", &json!({"prompt": text}));
    reply["tokens"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// Returns the embedding that the mock executor (hash model) computes for `tokens`, cut to `dimensions` and
/// normalised.
fn expected(tokens: &[u32], dimensions: usize) -> Vec<f32> {
    let mut vector = pooled(pooling_hash(&PoolingMethod::LastToken, tokens), POOLED_WIDTH);
    vector.truncate(dimensions);
    let norm = vector.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    vector.iter().map(|x| (f64::from(*x) / norm) as f32).collect()
}

fn near(found: &[f32], expected: &[f32]) -> bool {
    let close = |(a, b): (&f32, &f32)| (a - b).abs() < 1e-6;
    found.len() == expected.len() && found.iter().zip(expected).all(close)
}

fn check_error(reply: &HttpReply, status: u16, param: &str) {
    let text = String::from_utf8_lossy(&reply.body);
    assert_eq!(reply.status, status, "{param}: {text}");
    let found = reply.json()["error"]["param"].as_str().unwrap_or_default().to_owned();
    assert_eq!(found, param, "{text}");
}

#[test]
fn embeddings_of_all_input_forms() {
    let server = start(embedder());
    let ids = ids_of(&server, "abc");
    let inputs = [json!("abc"), json!(["abc"]), json!(ids), json!([ids])];
    for input in inputs {
        let reply = ok(&server, "/v1/embeddings", &json!({"input": input}));
        assert_eq!(
            (&reply["object"], &reply["data"][0]["object"]),
            (&json!("list"), &json!("embedding"))
        );
        assert!(reply["id"].as_str().unwrap().starts_with("embd-"), "{reply}");
        let found = embeddings(&reply);
        assert!(near(&found[0], &expected(&ids, POOLED_WIDTH)), "{input}: {found:?}");
        let tokens = ids.len();
        assert_eq!(reply["usage"]["prompt_tokens"], tokens);
        assert_eq!(reply["usage"]["total_tokens"], tokens);
    }
    let texts: Vec<String> = (0..40).map(|i| "x".repeat(i * 37 + 1)).collect();
    let reply = ok(&server, "/embeddings", &json!({"input": texts}));
    for (index, (item, text)) in reply["data"].as_array().unwrap().iter().zip(&texts).enumerate() {
        assert_eq!(item["index"], index);
        let expected = expected(&ids_of(&server, text), POOLED_WIDTH);
        assert!(near(&floats(&item["embedding"]), &expected), "text {index}");
    }
    server.wait_idle(Duration::from_secs(2));
}

#[test]
fn base64_embeddings_have_the_same_bits() {
    let server = start(embedder());
    let mut body = json!({"input": ["a", "bcd"], "dimensions": 5});
    let floats = embeddings(&ok(&server, "/v1/embeddings", &body));
    body["encoding_format"] = json!("base64");
    let reply = ok(&server, "/v1/embeddings", &body);
    for (index, floats) in floats.iter().enumerate() {
        let bytes: Vec<u8> = floats.iter().flat_map(|x| x.to_le_bytes()).collect();
        assert_eq!(reply["data"][index]["embedding"], base64(&bytes));
    }
}

/// Encodes bytes in base64 with padding, bit by bit.
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let bits: Vec<u8> =
        bytes.iter().flat_map(|byte| (0..8).rev().map(move |i| byte >> i & 1)).collect();
    let digit = |bits: &[u8]| {
        let value = (0..6).fold(0, |sum, i| sum * 2 + bits.get(i).copied().unwrap_or(0));
        char::from(DIGITS[usize::from(value)])
    };
    let mut text: String = bits.chunks(6).map(digit).collect();
    while !text.len().is_multiple_of(4) {
        text.push('=');
    }
    text
}

#[test]
fn dimensions_and_activation_shape_the_embedding() {
    let server = start(embedder());
    let ids = ids_of(&server, "abc");
    let of = |more: &Value| {
        let mut body = json!({"input": "abc"});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        embeddings(&ok(&server, "/v1/embeddings", &body)).remove(0)
    };
    assert!(near(&of(&json!({"dimensions": 3})), &expected(&ids, 3)));
    let raw = pooled(pooling_hash(&PoolingMethod::LastToken, &ids), POOLED_WIDTH);
    assert_eq!(of(&json!({"use_activation": false})), raw);
    assert_eq!(of(&json!({"normalize": false})), raw);
    let cut = of(&json!({"truncate_prompt_tokens": 2}));
    assert!(near(&cut, &expected(&ids[..2], POOLED_WIDTH)));
    let header =
        post(server.address, "/v1/embeddings", &json!({"input": "abc", "user": "u", "zzz": 1}));
    assert_eq!(header.header("x-hadron-ignored-fields"), Some("zzz, user"));
}

#[test]
fn embedding_errors_name_the_field() {
    let server = start(embedder());
    let cases = [
        (json!({}), "input"),
        (json!({"input": []}), "input"),
        (json!({"input": ""}), "input"),
        (json!({"input": ["a", ""]}), "input[1]"),
        (json!({"input": [1, "a"]}), "input"),
        (json!({"input": [99_999_999]}), "input"),
        (json!({"input": {"a": 1}}), "input"),
        (json!({"input": "a", "encoding_format": "hex"}), "encoding_format"),
        (json!({"input": "a", "dimensions": 0}), "dimensions"),
        (json!({"input": "a", "dimensions": 9}), "dimensions"),
        (json!({"input": "a", "messages": []}), "messages"),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}),
            "messages[0].content[0]",
        ),
        (json!({"input": "x".repeat(5_000)}), "input"),
    ];
    for (body, param) in cases {
        let reply = post(server.address, "/v1/embeddings", &body);
        let found = reply.json()["error"]["param"].as_str().unwrap_or_default().to_owned();
        assert_eq!(reply.status, 400, "{body}: {}", reply.json());
        assert!(found.starts_with(param.split('[').next().unwrap()), "{body}: {}", reply.json());
    }
    let many = vec!["a"; 2_049];
    check_error(&post(server.address, "/v1/embeddings", &json!({"input": many})), 400, "input");
    let reply = post(server.address, "/v1/embeddings", &json!({"input": "a", "model": "other"}));
    check_error(&reply, 404, "model");
    server.wait_idle(Duration::from_secs(2));
}

#[test]
fn prompt_may_fill_the_whole_context() {
    let setup =
        ServerSetup { pooler: Some(embedder()), max_model_len: 64, ..ServerSetup::default() };
    let server = TestServer::start(&setup);
    let of = |tokens: usize| json!({"input": vec![65; tokens]});
    let full = ok(&server, "/v1/embeddings", &of(64));
    assert!(near(&embeddings(&full)[0], &expected(&[65; 64], POOLED_WIDTH)));
    assert_eq!(full["usage"]["prompt_tokens"], 64);
    check_error(&post(server.address, "/v1/embeddings", &of(65)), 400, "input");
    let mut cut = of(500);
    cut["truncate_prompt_tokens"] = json!(-1);
    assert_eq!(embeddings(&ok(&server, "/v1/embeddings", &cut)), embeddings(&full));
}

#[test]
fn each_runner_rejects_the_routes_of_the_other() {
    let pooling = start(embedder());
    let generating = TestServer::start(&ServerSetup::default());
    for path in ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/generate"] {
        let reply = post(pooling.address, path, &json!({"prompt": "a"})).json();
        assert_eq!(reply["error"]["reason"], "wrong_runner", "{path}: {reply}");
    }
    // Errors of this route have the form of Anthropic's API.
    let reply = post(pooling.address, "/v1/messages", &json!({}));
    let message = reply.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(reply.status == 400 && message.contains("--runner generate"), "{message}");
    for path in ["/v1/embeddings", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"] {
        let reply = post(generating.address, path, &json!({"input": "a"}));
        assert_eq!(reply.status, 400, "{path}");
        let reply = reply.json();
        assert_eq!(reply["error"]["reason"], "wrong_runner", "{path}: {reply}");
        assert!(reply["error"]["message"].as_str().unwrap().contains("--runner pooling"));
    }
    assert_eq!(get(pooling.address, "/model_info").json()["is_generation"], false);
    assert_eq!(get(generating.address, "/model_info").json()["is_generation"], true);
}

#[test]
fn scores_of_an_embedding_model_are_cosines() {
    let server = start(embedder());
    let vector = |text: &str| {
        let reply = ok(&server, "/v1/embeddings", &json!({"input": text}));
        embeddings(&reply).remove(0)
    };
    let cosine =
        |a: &str, b: &str| vector(a).iter().zip(vector(b)).map(|(x, y)| x * y).sum::<f32>();
    let reply = ok(&server, "/score", &json!({"text_1": "q", "text_2": ["ab", "cd"]}));
    let scores: Vec<f32> =
        (0..2).map(|i| reply["data"][i]["score"].as_f64().unwrap() as f32).collect();
    assert!(near(&scores, &[cosine("q", "ab"), cosine("q", "cd")]), "{reply}");
    assert_eq!(reply["data"][1]["object"], "score");
    let pairs = json!({"queries": ["a", "b"], "documents": ["b", "b"]});
    let reply = ok(&server, "/v1/score", &pairs);
    assert!((reply["data"][1]["score"].as_f64().unwrap() - 1.0).abs() < 1e-6, "{reply}");
}

#[test]
fn reranker_scores_pairs_by_two_tokens() {
    let server = start(reranker());
    let texts = ["first", "second one", "third"];
    let logit = |text: &str| {
        let tokens = ids_of(&server, &format!("q{text}"));
        let hash = pooling_hash(&reranker().method, &tokens);
        let values = pooled(hash, 2);
        values[1] - values[0]
    };
    let sigmoid = |x: f32| 1.0 / (1.0 + (-x).exp());
    let scores: Vec<f32> = texts.iter().map(|text| sigmoid(logit(text))).collect();
    let reply = ok(&server, "/score", &json!({"text_1": "q", "text_2": texts}));
    let found: Vec<f32> =
        (0..3).map(|i| reply["data"][i]["score"].as_f64().unwrap() as f32).collect();
    assert!(near(&found, &scores), "{found:?} {scores:?}");
    for path in ["/rerank", "/v1/rerank", "/v2/rerank"] {
        let reply = ok(&server, path, &json!({"query": "q", "documents": texts, "top_n": 2}));
        let results = reply["results"].as_array().unwrap();
        assert_eq!(results.len(), 2);
        let mut order: Vec<usize> = (0..3).collect();
        order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
        for (result, index) in results.iter().zip(order) {
            assert_eq!(
                (&result["index"], &result["document"]["text"]),
                (&json!(index), &json!(texts[index]))
            );
            assert!(
                (result["relevance_score"].as_f64().unwrap() as f32 - scores[index]).abs() < 1e-6
            );
        }
        assert!(reply["usage"]["total_tokens"].as_u64().unwrap() > 20, "{reply}");
    }
    let raw = json!({"query": "q", "documents": texts, "return_documents": false, "use_activation": false});
    let reply = ok(&server, "/rerank", &raw);
    let first = &reply["results"][0];
    assert!(first.get("document").is_none(), "{reply}");
    let index = first["index"].as_u64().unwrap() as usize;
    assert!((first["relevance_score"].as_f64().unwrap() as f32 - logit(texts[index])).abs() < 1e-6);
    check_error(&post(server.address, "/rerank", &json!({"query": "q"})), 400, "documents");
    check_error(&post(server.address, "/rerank", &json!({"documents": ["a"]})), 400, "query");
    let reply = post(server.address, "/v1/embeddings", &json!({"input": "a"}));
    assert_eq!(reply.json()["error"]["reason"], "no_embeddings");
}

/// Checks that a request is rejected within 10 s, that is, without tokenising all of its prompts.
fn check_fast_error(server: &TestServer, path: &str, body: &Value, param: &str) {
    let started_at = Instant::now();
    check_error(&post(server.address, path, body), 400, param);
    assert!(started_at.elapsed() < Duration::from_secs(10), "{path}: {:?}", started_at.elapsed());
}

#[test]
fn repeated_long_query_is_rejected_before_its_prompts() {
    let templated = PoolerSettings { has_pair_template: true, ..reranker() };
    let template = "{% for message in messages %}{{ message.content }}{% endfor %}";
    let setup = |pooler| ServerSetup {
        pooler: Some(pooler),
        template: Some(template),
        ..ServerSetup::default()
    };
    for pooler in [reranker(), templated] {
        let server = TestServer::start(&setup(pooler));
        let query = "a1 ".repeat(1_000_000);
        let documents = vec!["a"; 2_000];
        let mut body = json!({"query": query, "documents": documents});
        check_fast_error(&server, "/rerank", &body, "query");
        body["truncate_prompt_tokens"] = json!(16);
        check_fast_error(&server, "/rerank", &body, "query");
        let scored = json!({"queries": query, "documents": documents});
        check_fast_error(&server, "/score", &scored, "queries");
        // One pair is below the limit on the total prompt size, but its prompt exceeds the context length.
        let one = json!({"query": query, "documents": ["a"]});
        check_fast_error(&server, "/rerank", &one, "query");
        let short = json!({"query": "q", "documents": vec!["a"; 500]});
        assert_eq!(ok(&server, "/rerank", &short)["results"].as_array().unwrap().len(), 500);
    }
}

#[test]
fn errors_about_pairs_name_the_field_of_the_text() {
    let long = "x".repeat(5_000);
    for pooler in [embedder(), reranker()] {
        let server = start(pooler);
        for (path, body, param) in [
            ("/score", json!({"queries": long, "documents": ["a"]}), "queries"),
            ("/score", json!({"queries": "a", "documents": ["a", long]}), "documents"),
            ("/score", json!({"data_1": "a", "data_2": long}), "data_2"),
            ("/score", json!({"queries": "a"}), "documents"),
            ("/score", json!({"text_2": "a"}), "text_1"),
            ("/rerank", json!({"query": long, "documents": ["a"]}), "query"),
            ("/rerank", json!({"query": "a", "documents": [long]}), "documents"),
        ] {
            check_error(&post(server.address, path, &body), 400, param);
        }
    }
}

#[test]
fn request_above_the_queue_limit_counts_texts() {
    let admission = AdmissionLimits { requests: 8, ..ServerSetup::default().admission };
    let setup = ServerSetup { pooler: Some(embedder()), admission, ..ServerSetup::default() };
    let server = TestServer::start(&setup);
    let reply = post(server.address, "/v1/embeddings", &json!({"input": vec!["a"; 9]}));
    check_error(&reply, 400, "input");
    let message = reply.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("9 texts") && message.contains("at most 8"), "{message}");
}

#[test]
fn health_probe_passes_on_a_busy_pooling_server() {
    let idle = start(reranker());
    assert_eq!(get(idle.address, "/health_generate").status, 200);
    let setup = ServerSetup {
        pooler: Some(embedder()),
        step_time: Duration::from_millis(100),
        step_tokens: 16,
        max_num_seqs: 1,
        admission: AdmissionLimits { requests: 64, ..ServerSetup::default().admission },
        ..ServerSetup::default()
    };
    let server = TestServer::start(&setup);
    let body = json!({"input": vec!["x".repeat(400); 64]}).to_string();
    let mut client = HttpClient::connect(server.address);
    client.send("POST", "/v1/embeddings", "", body.as_bytes());
    while server.client().requests_in_flight() < 64 {
        std::thread::sleep(Duration::from_millis(1));
    }
    // The queue is full, so the request that the health probe sends to the engine is rejected. The probe
    // succeeds nevertheless, because other requests make progress.
    assert_eq!(get(server.address, "/health_generate").status, 200);
    assert!(server.client().requests_in_flight() > 0, "the probe waited for other requests");
}

#[test]
fn client_that_leaves_frees_its_prompts() {
    let setup = ServerSetup {
        pooler: Some(embedder()),
        step_time: Duration::from_millis(20),
        step_tokens: 16,
        ..ServerSetup::default()
    };
    let server = TestServer::start(&setup);
    let body = json!({"input": vec!["x".repeat(400); 64]}).to_string();
    let mut client = HttpClient::connect(server.address);
    client.send("POST", "/v1/embeddings", "", body.as_bytes());
    while server.client().requests_in_flight() == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(client);
    server.wait_idle(Duration::from_secs(5));
}
