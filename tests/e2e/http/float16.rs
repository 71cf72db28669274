//! float16 models: written by `hadron synth`, selected by `--dtype auto`, computed by one and by several
//! ranks, and rejected if the KV cache has another 16-bit type.

use super::server_process::{ServerProcess, command};
use crate::bounded_child::run_to_end;
use crate::http_client::{get, post};
use serde_json::{Value, json};
use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;

/// A checkpoint of two layers, written as by `hadron synth --dtype float16` from a `config.json` that states
/// bfloat16.
fn model() -> tempfile::TempDir {
    let config = json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 272,
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "max_position_embeddings": 512, "hidden_act": "silu",
        "tie_word_embeddings": false, "bos_token_id": 1, "eos_token_id": 2,
        "torch_dtype": "bfloat16"
    });
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.json");
    fs::write(&path, config.to_string()).unwrap();
    let mut hadron = Command::new(env!("CARGO_BIN_EXE_hadron"));
    let made = hadron.arg("synth").args([&path, &folder.path().join("model")]);
    let made = run_to_end(made.args(["--dtype", "float16"]));
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    folder
}

/// Tensor dtypes named in the header of a safetensors file.
fn stored_types(file: &Path) -> Vec<String> {
    let bytes = fs::read(file).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let tensors = header.as_object().unwrap().values();
    tensors.filter_map(|tensor| tensor["dtype"].as_str().map(str::to_owned)).collect()
}

/// Log-probabilities of the tokens of one prompt; their low-order bits depend on the dtype in which the model
/// is computed.
fn logprobs(at: SocketAddr) -> Vec<f64> {
    let prompt: Vec<u32> = (0..60).map(|i| 3 + i * i * 7 % 250).collect();
    let body = json!({"prompt": prompt, "max_tokens": 1, "ignore_eos": true, "temperature": 0,
                      "logprobs": 1, "echo": true});
    let reply = post(at, "/v1/completions", &body).json();
    let listed = reply["choices"][0]["logprobs"]["token_logprobs"].as_array();
    let listed = listed.unwrap_or_else(|| panic!("no log-probabilities: {reply}"));
    listed.iter().filter_map(Value::as_f64).collect()
}

fn furthest(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

#[test]
fn float16_checkpoints_are_served_in_float16() {
    let folder = model();
    let dir = folder.path().join("model");
    let written: Value =
        serde_json::from_slice(&fs::read(dir.join("config.json")).unwrap()).unwrap();
    assert_eq!(written["torch_dtype"], "float16");
    let types = stored_types(&dir.join("model.safetensors"));
    assert!(!types.is_empty() && types.iter().all(|name| name == "F16"), "{types:?}");

    let served = |flags: &[&str], dtype: &str| {
        let flags = [&[dir.to_str().unwrap(), "--threads", "1", "--device", "cpu"], flags].concat();
        let process = ServerProcess::start(&flags);
        let info = get(process.address, "/server_info").json();
        assert_eq!(info["engine"]["dtype"], dtype, "{flags:?}");
        logprobs(process.address)
    };
    let [exact, rounded] = ["float32", "bfloat16"].map(|dtype| served(&["--dtype", dtype], dtype));
    let half = served(&["--dtype", "float16"], "float16");
    assert_eq!(served(&[], "float16"), half, "auto selects the dtype of config.json");
    let shared = served(&["--dtype", "half", "--tensor-parallel-size", "2"], "float16");
    let off = [&half, &shared, &rounded].map(|found| furthest(found, &exact));
    println!("f16, by two ranks, bf16: {off:?}");
    assert!(off[0] > 0.0 && off[0] < off[2] / 2.0, "{off:?}");
    assert!(off[1] > 0.0 && off[1] < off[2] / 2.0, "{off:?}");
}

#[test]
fn float16_with_another_kv_cache_dtype_is_rejected() {
    let folder = model();
    let dir = folder.path().join("model");
    let cases: [(&[&str], &str); 2] = [
        (&["--dtype", "float16", "--kv-cache-dtype", "bf16"], "--kv-cache-dtype bf16: "),
        (&["--device", "cpu", "--kv-cache-dtype", "bf16"], "--kv-cache-dtype bf16: "),
    ];
    for (flags, reason) in cases {
        let output = run_to_end(&mut command(&[&[dir.to_str().unwrap()], flags].concat()));
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && text.contains(reason), "{flags:?}: {text}");
    }
}
