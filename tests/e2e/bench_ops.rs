//! Tests `hadron bench ops`: it prints a table and writes a file, which `hadron bench compare` reads.

use crate::bounded_child::run_to_end;
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};

fn bench(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hadron"));
    run_to_end(command.arg("bench").args(args).env("RUST_LOG", "error"))
}

#[test]
fn bench_ops_writes_table_and_comparable_results() {
    let folder = tempfile::tempdir().unwrap();
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/demo");
    let (demo, results) = (demo.to_str().unwrap(), folder.path().join("ops.json"));
    let results = results.to_str().unwrap();
    let sizes = [
        "--device",
        "cpu",
        "--threads",
        "1",
        "--tokens",
        "1,4",
        "--context",
        "8",
        "--repeats",
        "2",
    ];
    let rest = ["--only", "o_proj,lm_head", "--output", results];
    let output = bench(&[&["ops", demo], &sizes[..], &rest[..]].concat());
    let table = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(table.lines().count(), 1 + 2 * 2, "{table}");
    assert!(table.contains("GB/s") && table.contains("[4, 256] x [192, 256]"), "{table}");
    let result: Value = serde_json::from_slice(&std::fs::read(results).unwrap()).unwrap();
    assert_eq!(result["kind"], "ops");
    let levels = result["levels"].as_array().unwrap();
    assert_eq!(levels.len(), 4);
    for level in levels {
        let (time_us, bytes) = (&level["time_us"]["p50"], &level["bytes"]);
        let rate = bytes.as_f64().unwrap() / time_us.as_f64().unwrap() / 1e3;
        assert!((level["gb_per_s"].as_f64().unwrap() - rate).abs() < 1e-6 * rate, "{level}");
    }
    let compared = bench(&["compare", results, results]);
    let table = String::from_utf8(compared.stdout).unwrap();
    assert!(table.contains("op o_proj, tokens 4") && table.contains("+0.0 %"), "{table}");
}

#[test]
fn bench_ops_rejects_unknown_ops_by_name() {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/demo");
    let says = |args: &[&str], words: &str| {
        let output = bench(&[&["ops", demo.to_str().unwrap(), "--device", "cpu"], args].concat());
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && text.contains(words), "{args:?}: {text}");
    };
    says(&["--only", "o_prog"], "unknown op; known ops: embedding");
    says(&["--only", "experts"], "has none of the ops");
    says(&["--tokens", "0"], "at least 1");
    says(&["--block-size", "3"], "an even number");
}
