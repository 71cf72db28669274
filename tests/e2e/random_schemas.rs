//! A thousand random JSON schemas on a model with random weights: every complete output is valid according to
//! a validator that shares no code with the grammar library.

use crate::http_client::HttpClient;
use crate::test_server::{ServerSetup, TestServer};
use models::synth::{self, SynthDType, SynthOptions};
use serde_json::{Map, Value, json};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const SCHEMAS: u64 = 1_000;
const CONNECTIONS: u64 = 16;
const TOKENS: u32 = 600;
/// Maximum number of retries of one request if the machine is too busy for the test compilation of its
/// grammar (dry run).
const BUSY_RETRIES_MAX: u32 = 20;
/// Maximum number of retries of all requests.
const BUSY_TOTAL_MAX: u64 = SCHEMAS / 4;
/// Minimum number of outputs that must end by themselves instead of at `max_tokens`.
const COMPLETED_MIN: u64 = SCHEMAS * 9 / 10;

/// Random number generator of the schemas: splitmix64.
struct SchemaRng(u64);

impl SchemaRng {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31)) % sides
    }

    fn within(&mut self, low: i64, high: i64) -> i64 {
        low + self.roll((high - low + 1) as u64) as i64
    }
}

/// A random schema of at most `depth` levels.
fn schema(request_rng: &mut SchemaRng, depth: u32) -> Value {
    let kinds = if depth == 0 { 7 } else { 11 };
    match request_rng.roll(kinds) {
        0 => json!({"type": "boolean"}),
        1 => json!({"type": (["null", "boolean"])}),
        2 => integer(request_rng),
        3 => number(request_rng),
        4 | 5 => string(request_rng),
        6 => literals(request_rng),
        7 | 8 => object(request_rng, depth),
        9 => array(request_rng, depth),
        _ => json!({"anyOf": [schema(request_rng, depth - 1), schema(request_rng, depth - 1)]}),
    }
}

fn integer(request_rng: &mut SchemaRng) -> Value {
    let low = request_rng.within(-2_000, 2_000);
    let high = low + request_rng.within(0, 5_000);
    match request_rng.roll(4) {
        0 => json!({"type": "integer", "minimum": low, "maximum": high}),
        1 => json!({"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": high + 2}),
        2 => {
            json!({"type": "integer", "minimum": 0, "maximum": 900, "multipleOf": request_rng.within(2, 9)})
        }
        _ => json!({"type": "integer", "minimum": low}),
    }
}

/// A number schema. It is bounded, because a number of a thousand digits is valid but the validator cannot
/// parse it.
fn number(request_rng: &mut SchemaRng) -> Value {
    let low = request_rng.within(-9_000, 9_000) as f64 / 8.0;
    json!({"type": "number", "minimum": low, "maximum": low + request_rng.within(1, 900) as f64 / 4.0})
}

fn string(request_rng: &mut SchemaRng) -> Value {
    const PATTERNS: [&str; 6] = [
        "^[a-z]{2,6}$",
        "^(foo|bar)-[0-9]+x$",
        "^\\d{3}\\.\\d$",
        "^[A-F]+[^A-F ]{2}$",
        "^é?[ß-ü]{1,3}$",
        "[0-9]{2}$",
    ];
    // Date formats are excluded, because the grammar ignores leap years and leap seconds and the validator
    // does not.
    const FORMATS: [&str; 3] = ["uuid", "ipv4", "ipv6"];
    let least = request_rng.within(0, 6);
    match request_rng.roll(4) {
        0 => {
            json!({"type": "string", "minLength": least, "maxLength": least + request_rng.within(0, 20)})
        }
        1 => json!({"type": "string", "maxLength": 12}),
        2 => json!({"type": "string", "pattern": PATTERNS[request_rng.roll(6) as usize]}),
        _ => json!({"type": "string", "format": FORMATS[request_rng.roll(3) as usize]}),
    }
}

fn literals(request_rng: &mut SchemaRng) -> Value {
    let all = [
        json!("a \"b\""),
        json!(17),
        json!(null),
        json!(-0.5),
        json!("ü\n"),
        json!(true),
        json!([1, {"x": []}]),
    ];
    let first = request_rng.roll(4) as usize;
    match request_rng.roll(2) {
        0 => json!({"const": all[first]}),
        _ => json!({"enum": all[first..first + 3]}),
    }
}

fn object(request_rng: &mut SchemaRng, depth: u32) -> Value {
    let mut properties = Map::new();
    let mut required = Vec::new();
    for name in ["id", "name of it", "größe", "a\"b"].into_iter().take(request_rng.roll(5) as usize)
    {
        properties.insert(name.to_owned(), schema(request_rng, depth - 1));
        if request_rng.roll(3) > 0 {
            required.push(name);
        }
    }
    let mut object = json!({"type": "object", "properties": properties, "required": required});
    object["additionalProperties"] = match request_rng.roll(4) {
        0 => json!({"type": "integer", "minimum": 0, "maximum": 99}),
        _ => json!(false),
    };
    object
}

fn array(request_rng: &mut SchemaRng, depth: u32) -> Value {
    let least = request_rng.within(0, 3);
    let mut array = json!({"type": "array", "items": schema(request_rng, depth - 1), "minItems": least,
        "maxItems": least + request_rng.within(0, 3)});
    if request_rng.roll(4) == 0 {
        array["prefixItems"] = json!([schema(request_rng, 0)]);
        array["maxItems"] = json!(least + 3);
    }
    array
}

/// A random root schema; some have definitions, of which one is recursive.
fn root_schema(request_rng: &mut SchemaRng) -> Value {
    let inner = schema(request_rng, 3);
    match request_rng.roll(6) {
        0 => json!({"$ref": "#/$defs/it", "$defs": {"it": inner}}),
        1 => {
            json!({"type": "object", "required": ["value"], "additionalProperties": false, "properties": {
            "value": inner, "next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}}})
        }
        _ => inner,
    }
}

/// Writes a model with random weights and one token per byte. Returns its hidden size.
pub(crate) fn write_model(folder: &Path) -> usize {
    let hidden_size = 64;
    let config = json!({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": hidden_size,
        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "vocab_size": 288, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0, "tie_word_embeddings": false, "torch_dtype": "float32", "hidden_act": "silu"});
    let source = folder.join("source.json");
    std::fs::write(&source, config.to_string()).unwrap();
    let options = SynthOptions { seed: 5, dtype: SynthDType::F32, ..SynthOptions::default() };
    synth::write(&source, &folder.join("model"), &options, &mut |_, _| ()).unwrap();
    hidden_size
}

/// Numbers of requests with random schemas by outcome, and number of output tokens.
#[derive(Default)]
struct SchemaCounts {
    completed: AtomicU64,
    truncated: AtomicU64,
    rejected: AtomicU64,
    /// Number of replies that reported a machine too busy for the test compilation of the grammar (dry run).
    busy: AtomicU64,
    tokens: AtomicU64,
}

fn complete(client: &mut HttpClient, seed: u64, score: &SchemaCounts) {
    let schema = root_schema(&mut SchemaRng(seed));
    let body = json!({"prompt": "{", "max_tokens": TOKENS, "temperature": 1, "seed": seed, "structured_outputs":
        {"json": schema, "disable_any_whitespace": seed.is_multiple_of(2)}});
    let mut reply = client.post("/v1/completions", &body);
    // Test compilations of grammars (dry runs) have a low priority. On a busy machine they may get too little
    // time, as the reply states in status 429 or in the error message.
    for _ in 0..BUSY_RETRIES_MAX {
        if reply.status != 429 && !String::from_utf8_lossy(&reply.body).contains("took longer") {
            break;
        }
        score.busy.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(500));
        reply = client.post("/v1/completions", &body);
    }
    let message = reply.json();
    if reply.status == 400 {
        println!("seed {seed}: {} for {schema}", message["error"]["message"]);
        score.rejected.fetch_add(1, Ordering::Relaxed);
        return;
    }
    assert_eq!(reply.status, 200, "seed {seed}: {message} for {schema}");
    score
        .tokens
        .fetch_add(message["usage"]["completion_tokens"].as_u64().unwrap(), Ordering::Relaxed);
    let text = message["choices"][0]["text"].as_str().unwrap();
    if message["choices"][0]["finish_reason"] == "length" {
        score.truncated.fetch_add(1, Ordering::Relaxed);
        return;
    }
    assert_eq!(message["choices"][0]["finish_reason"], "stop", "seed {seed}: {message}");
    let value: Value = serde_json::from_str(text)
        .unwrap_or_else(|e| panic!("seed {seed}: {e} in {text:?} for {schema}"));
    let judge = jsonschema::options().should_validate_formats(true).build(&schema).unwrap();
    let errors: Vec<String> = judge.iter_errors(&value).map(|e| e.to_string()).collect();
    assert!(errors.is_empty(), "seed {seed}: {text:?} for {schema}: {errors:?}");
    score.completed.fetch_add(1, Ordering::Relaxed);
}

#[test]
fn random_schemas_are_obeyed() {
    let folder = tempfile::tempdir().unwrap();
    write_model(folder.path());
    let server = TestServer::start(&ServerSetup {
        model: Some(folder.path().join("model")),
        max_model_len: 1_024,
        blocks: 1_024,
        max_num_seqs: CONNECTIONS as u32,
        ..ServerSetup::default()
    });
    let (score, since) = (SchemaCounts::default(), Instant::now());
    std::thread::scope(|scope| {
        for first in 0..CONNECTIONS {
            let (score, address) = (&score, server.address);
            scope.spawn(move || {
                let mut client = HttpClient::connect(address);
                for seed in (first..SCHEMAS).step_by(CONNECTIONS as usize) {
                    complete(&mut client, seed, score);
                }
            });
        }
    });
    let count = |n: &AtomicU64| n.load(Ordering::Relaxed);
    let took = since.elapsed();
    println!(
        "{} complete and valid, {} cut at {TOKENS} tokens, {} rejected; {} tokens in {took:?}",
        count(&score.completed),
        count(&score.truncated),
        count(&score.rejected),
        count(&score.tokens)
    );
    assert_eq!(count(&score.rejected), 0, "every schema is of the supported kind");
    assert!(count(&score.busy) <= BUSY_TOTAL_MAX, "{} times too busy", count(&score.busy));
    assert!(count(&score.completed) >= COMPLETED_MIN);
    server.wait_idle(Duration::from_secs(5));
}
