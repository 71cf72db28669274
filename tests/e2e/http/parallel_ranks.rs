//! Several executor processes: ranks that share a model, independent replicas, and failures of ranks and
//! replicas.

use super::executor_process::{
    body, children, complete_text, finish, is_ready, is_zombie, send, stream, stream_of, wait_until,
};
use super::server_process::{ServerProcess, command};
use crate::bounded_child::run_to_end;
use crate::deadlines::BoundedJoin as _;
use crate::http_client::{HttpClient, get, post};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::net::SocketAddr;
use std::process::Command;
use std::time::Duration;

const EXACT: &[&str] = &["--threads", "1", "--dtype", "float32"];

pub(super) fn start(flags: &[&str]) -> ServerProcess {
    ServerProcess::start(&[EXACT, flags].concat())
}

/// Process ids of the server's executors, keyed by world rank.
pub(super) fn ranks(process: &ServerProcess) -> BTreeMap<u16, u32> {
    ranks_of(process.id())
}

/// Process ids of the executors of the process with id `server`, keyed by world rank.
pub(crate) fn ranks_of(server: u32) -> BTreeMap<u16, u32> {
    let rank = |pid: &u32| {
        let line = fs::read_to_string(format!("/proc/{pid}/cmdline")).ok()?;
        let mut words = line.split('\0').skip_while(|word| *word != "--rank");
        words.nth(1)?.parse().ok()
    };
    let found = children(server);
    found.iter().filter_map(|pid| Some((rank(pid)?, *pid))).collect()
}

/// Value of a series of `/metrics`.
pub(super) fn metric(address: SocketAddr, series: &str) -> f64 {
    let page = String::from_utf8(get(address, "/metrics").body).unwrap();
    let line = page.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {series}: {page}")).parse().unwrap()
}

fn on_replica(rank: u16, tokens: u32, streamed: bool) -> Value {
    let mut body = body(tokens, streamed);
    body["data_parallel_rank"] = rank.into();
    body
}

#[test]
fn tp_ranks_match_one_rank_and_survive_a_kill() {
    const TOKENS: u32 = 600;
    let baseline = start(&[]);
    let expected = complete_text(baseline.address, TOKENS);
    drop(baseline);
    let mut process = start(&["--tensor-parallel-size", "2"]);
    let at = process.address;
    let former = ranks(&process);
    assert_eq!(former.keys().collect::<Vec<_>>(), [&0, &1]);
    let joining = r#"hadron:startup_seconds{engine="0",model_name="hadron-demo",phase="comm"}"#;
    assert!(metric(at, joining) > 0.0);
    assert!(complete_text(at, TOKENS) == expected, "two ranks differ from one");
    let streams: Vec<_> = (0..2).map(|_| stream(at, TOKENS)).collect();
    send(former[&1], "-KILL");
    wait_until(Duration::from_secs(4), "the failure", || !is_ready(at));
    for stream in streams {
        let (text, end) = finish(stream);
        assert!(text == expected && end == "length", "differs from an undisturbed run: {text}");
    }
    let latter = ranks(&process);
    assert_eq!(latter.len(), 2);
    assert!(former.iter().all(|(rank, pid)| latter[rank] != *pid), "{former:?} {latter:?}");
    assert_eq!(
        metric(at, r#"hadron:executor_up{engine="0",model_name="hadron-demo",rank="1"}"#),
        1.0
    );

    // A hanging rank blocks the other rank at a collective: both are replaced.
    send(latter[&1], "-STOP");
    let stalled = std::thread::spawn(move || complete_text(at, 20));
    wait_until(Duration::from_secs(12), "the failure", || !is_ready(at));
    assert!(expected.starts_with(&stalled.join_bounded()));
    assert!(ranks(&process).iter().all(|(rank, pid)| latter[rank] != *pid));

    process.signal("TERM");
    assert_eq!(process.exits_within(Duration::from_secs(20)).code(), Some(0));
    let left = former.values().chain(latter.values());
    let lives = |pid: &u32| fs::exists(format!("/proc/{pid}")).unwrap() && !is_zombie(*pid);
    assert!(!left.copied().any(|pid| lives(&pid)), "an executor outlived its server");
}

#[test]
fn replica_failure_leaves_the_other_serving() {
    const TOKENS: u32 = 1_000;
    let mut process = start(&["--data-parallel-size", "2"]);
    let at = process.address;
    let former = ranks(&process);
    let (expected, short) = (complete_text(at, TOKENS), complete_text(at, 20));
    let own = stream_of(at, &on_replica(0, TOKENS, true));
    let other = stream_of(at, &on_replica(1, TOKENS, true));
    send(former[&0], "-KILL");
    let restarts =
        r#"hadron:executor_restarts_total{cause="exited",engine="0",model_name="hadron-demo"}"#;
    wait_until(Duration::from_secs(4), "the failure", || metric(at, restarts) == 1.0);
    assert!(is_ready(at), "the other replica serves");
    assert_eq!(complete_text(at, 20), short, "wherever it is sent");
    let (text, end) = finish(other);
    assert!(text == expected && end == "length", "held up by another replica: {text}");
    let (text, end) = finish(own);
    assert!(text == expected && end == "length", "differs from an undisturbed run: {text}");
    let latter = ranks(&process);
    assert!(latter[&0] != former[&0] && latter[&1] == former[&1], "{former:?} {latter:?}");
    assert_eq!(metric(at, &restarts.replace(r#"engine="0""#, r#"engine="1""#)), 0.0);
    let recovered = |engine: u16| {
        metric(
            at,
            &format!(
                r#"hadron:requests_recovered_total{{cause="exited",engine="{engine}",model_name="hadron-demo"}}"#
            ),
        )
    };
    assert!(recovered(0) >= 1.0 && recovered(1) == 0.0);

    // While all replicas have failed, the server reports not ready, and requests wait.
    for pid in latter.values() {
        send(*pid, "-KILL");
    }
    wait_until(Duration::from_secs(4), "the failure of both", || !is_ready(at));
    assert_eq!(complete_text(at, 20), short);
    process.signal("TERM");
    assert_eq!(process.exits_within(Duration::from_secs(20)).code(), Some(0));
}

#[test]
fn two_replicas_of_two_tp_ranks_serve() {
    let process = start(&["-tp", "2", "-dp", "2", "--kv-cache-metrics"]);
    let at = process.address;
    let stays = r#"vllm:kv_block_lifetime_seconds_count{engine="1",model_name="hadron-demo"}"#;
    assert_eq!(metric(at, stays), 0.0, "measured, but nothing was evicted");
    assert_eq!(ranks(&process).len(), 4);
    let ask = |rank| {
        let reply = post(at, "/v1/completions", &on_replica(rank, 50, false)).json();
        reply["choices"][0]["text"].as_str().unwrap_or_else(|| panic!("{reply}")).to_owned()
    };
    assert_eq!(ask(0), ask(1));
    let loads = get(at, "/v1/loads").json();
    assert_eq!(loads["dp_rank_count"], 2);
    let blocks = |rank: usize| loads["loads"][rank]["max_total_num_tokens"].as_u64().unwrap();
    assert_eq!(blocks(0), blocks(1), "what each of the four can hold");
    // The same grammar bitmasks restrict a constrained output on both ranks of a replica.
    let mut constrained = body(40, false);
    constrained["structured_outputs"] = json!({"regex": "[a-c]{30}"});
    let reply = post(at, "/v1/completions", &constrained).json();
    let text = reply["choices"][0]["text"].as_str().unwrap_or_else(|| panic!("{reply}"));
    assert!(text.len() == 30 && text.chars().all(|c| ('a'..='c').contains(&c)), "{text}");
}

/// A checkpoint of a small MoE model, written to a temporary folder.
pub(crate) fn with_experts() -> tempfile::TempDir {
    synth(&json!({
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 272,
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
        "num_key_value_heads": 2, "intermediate_size": 96, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 4096,
        "tie_word_embeddings": false, "attention_bias": false, "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": true,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "bos_token_id": 1, "eos_token_id": 2,
    }))
}

/// A checkpoint with random f32 weights for `config`, in the subfolder `model` of a temporary folder.
pub(super) fn synth(config: &Value) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.json");
    fs::write(&path, config.to_string()).unwrap();
    let mut hadron = Command::new(env!("CARGO_BIN_EXE_hadron"));
    let model = folder.path().join("model");
    hadron.arg("synth").args([&path, &model]).args(["--dtype", "float32"]);
    assert!(run_to_end(&mut hadron).status.success());
    folder
}

/// Checks that layer `i` has routed `tokens[i]` tokens to its experts, from the server's expert counters.
fn check_experts_counted(at: SocketAddr, tokens: [u64; 2]) {
    let mut client = HttpClient::connect(at);
    client.send("GET", "/debug/experts", "Authorization: Bearer root\r\n", b"");
    let listed = client.read().unwrap().json();
    for (layer, tokens) in tokens.into_iter().enumerate() {
        let labels = format!("{{engine=\"0\",layer=\"{layer}\",model_name=\"m\"}}");
        let of = |name: &str| metric(at, &format!("hadron:expert_tokens_{name}{labels}")) as u64;
        assert_eq!(of("total"), tokens);
        assert!(of("hottest_total") >= 99, "at least one for each of the steps");
        let each = listed["replicas"][0]["logical_count"][layer].as_array().unwrap();
        let sum: u64 = each.iter().map(|count| count.as_u64().unwrap()).sum();
        assert_eq!((each.len(), sum), (8, tokens), "{listed}");
        let most = each.iter().filter_map(Value::as_u64).max().unwrap() as f64;
        let labels = labels.replace('}', ",rank=\"0\"}");
        let load = metric(at, &format!("hadron:expert_load_max_over_mean{labels}"));
        assert!((load - most * 8.0 / tokens as f64).abs() < 1e-9, "{load} {listed}");
    }
}

#[test]
fn expert_and_tensor_parallel_experts_are_equal() {
    let folder = with_experts();
    let model = folder.path().join("model").to_str().unwrap().to_owned();
    let of = |flags: &[&str]| {
        let small = ["--max-model-len", "256", "--num-gpu-blocks-override", "64"];
        let names = ["--served-model-name", "m", "--admin-key", "root"];
        let process = start(&[&[model.as_str()], &small[..], &names, flags].concat());
        let body = json!({"prompt": [5, 6, 7, 8, 9], "max_tokens": 100, "ignore_eos": true,
                          "temperature": 0, "return_token_ids": true});
        let reply = post(process.address, "/v1/completions", &body).json();
        // The last layer computes only one position of the prompt: the last one, from which a token is
        // sampled.
        check_experts_counted(process.address, [2 * (5 + 99), 2 * (1 + 99)]);
        reply["choices"][0]["token_ids"].clone()
    };
    let expected = of(&[]);
    assert_eq!(expected.as_array().map(Vec::len), Some(100));
    assert_eq!(of(&["-tp", "2"]), expected);
    assert_eq!(of(&["-tp", "2", "--enable-expert-parallel"]), expected);
    // An expert placement with a different order of experts; the most used experts of layer 0 have a copy on
    // each of the two ranks.
    let layers = json!([[3, 0, 1, 7, 2, 5, 4, 6, 3, 0, 1, 7], [6, 0, 1, 7, 4, 5, 3, 2]]);
    let file = folder.path().join("placement.json");
    fs::write(&file, json!({"physical_to_logical_map": layers}).to_string()).unwrap();
    let file = file.to_str().unwrap();
    assert_eq!(of(&["-tp", "2", "--ep", "--expert-placement", file]), expected);
}

#[test]
fn bad_expert_placement_fails_startup_naming_the_layer() {
    let folder = with_experts();
    let [model, file] = ["model", "placement.json"].map(|name| folder.path().join(name));
    let rejected = |text: &str, cause: &str| {
        fs::write(&file, text).unwrap();
        let [model, file] = [&model, &file].map(|path| path.to_str().unwrap());
        let flags = ["--port", "0", "-tp", "2", "--ep", "--expert-placement", file];
        let output = run_to_end(&mut command(&[&[model], &flags[..]].concat()));
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{message}");
        assert!(message.contains("--expert-placement") && message.contains(cause), "{message}");
    };
    let map = |layers: Value| json!({"physical_to_logical_map": layers}).to_string();
    let order = [0, 1, 2, 3, 4, 5, 6, 7];
    rejected(
        &map(json!([order, [0, 1, 2, 3, 4, 5, 6, 0]])),
        "layer 1: expert 7 has no physical expert",
    );
    rejected(&map(json!([order])), "the placement has 1 layers, the model 2");
    rejected(&map(json!([order, [8]])), "layer 1: 1 physical experts cannot be split over 2 ranks");
    let known = "unknown field `logical_count`, expected `physical_to_logical_map`";
    rejected(r#"{"logical_count": [[1]]}"#, known);
    let wrong = "layer 1: physical expert 2 is -3, which is not an expert id";
    rejected(&map(json!([order, [0, 1, -3, 3, 4, 5, 6, 7]])), wrong);
    rejected(&map(json!([["a"]])), "invalid type: string \"a\", expected a JSON number");
    rejected("", "EOF");
}

#[test]
fn bad_parallel_sizes_fail_startup_with_numbers() {
    let cases: &[(&[&str], &str)] = &[
        (&["--tensor-parallel-size", "3"], "cannot be split over 3 ranks"),
        (&["-tp", "2", "--enable-expert-parallel"], "no experts"),
        (&["-tp", "2", "--enable-dp-attention"], "--enable-dp-attention"),
    ];
    for (args, cause) in cases {
        let output = run_to_end(&mut command(&[&["--port", "0"], *args].concat()));
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{args:?}: {text}");
        assert!(text.contains(cause), "{args:?}: {text}");
    }
}
