//! Tests the scripts for a machine with AMD GPUs: hardware counters from files of rocprofv3, and the report of
//! `deploy/first_day_amd.sh`. They need Python; without it they end early.

use crate::bounded_child::{run_if_installed, run_to_end};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn at(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// Runs a Python script of the repository; returns `None` if Python is not installed.
fn python(script: &str, arguments: &[&str], path: &str) -> Option<Output> {
    let mut command = Command::new("python3");
    run_if_installed(command.arg(at(script)).args(arguments).env("PATH", path))
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

/// The value of `PATH`.
#[allow(clippy::disallowed_methods, reason = "the test puts a stand-in for a program in front")]
fn search_path() -> String {
    std::env::var("PATH").unwrap()
}

const COUNTERS: &str = "tests/bench/gpu/counters.py";

/// Table of `tests/bench/gpu/rocprofv3/counter_collection.csv`.
const TABLE: &str = "\
| kernel | dispatches | SQ_WAVES | SQ_INSTS_VALU | SQ_INSTS_SALU | SQ_INSTS_MFMA | SQ_INSTS_VMEM_RD | SQ_INSTS_VMEM_WR | SQ_INSTS_LDS | SQ_LDS_BANK_CONFLICT | SQ_LDS_IDX_ACTIVE | SQ_BUSY_CYCLES |
|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|
| add_rms_norm(float*, int) | 1 | 64 | 5,120 | 1,280 | 0 | 512 | 256 | 128 | 0 | 128 | 9,216 |
| gemm_small_m | 2 | 512 | 261,120 | 49,664 | 49,152 | 24,576 | 1,536 | 25,088 | 6,144 | 100,352 | 161,792 |
";

#[test]
fn counters_of_rocprofv3_are_summed_per_kernel() {
    let csv = at("tests/bench/gpu/rocprofv3/counter_collection.csv");
    let arguments = ["--csv", csv.to_str().unwrap()];
    let Some(output) = python(COUNTERS, &arguments, &search_path()) else { return };
    assert_eq!(text(&output.stdout), TABLE, "{}", text(&output.stderr));
}

#[test]
fn a_counter_that_a_gpu_lacks_does_not_hide_others() {
    let folder = at("tests/bench/gpu/rocprofv3");
    let path = format!("{}:{}", folder.display(), search_path());
    let Some(output) = python(COUNTERS, &["true"], &path) else { return };
    assert_eq!(text(&output.stdout), TABLE);
    let lacks = "not counted: SQ_WAIT_INST_ANY: unknown counters: SQ_WAIT_INST_ANY";
    let errors = text(&output.stderr);
    assert!(errors.lines().any(|line| line == lacks), "{errors}");

    let failed = python(COUNTERS, &["false"], &path).unwrap();
    assert!(!failed.status.success() && text(&failed.stderr).contains("has counted nothing"));
}

/// Output of `cargo test -- --nocapture --test-threads 1` with a failed test.
const FAILED_LOG: &str = "\
running 2 tests
test norm::rows_agree ... ok
test norm::tails_agree ... HADRON_SEED=7

thread 'norm::tails_agree' (812) panicked at kernels/tests/gpu/norm.rs:41:9:
assertion failed: error 0.5 > 0.008
note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace
FAILED

failures:

failures:
    norm::tails_agree

test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 130 filtered out; finished in 1.50s
";

#[test]
fn first_day_report_lists_failed_tests_and_reasons() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
    write("steps.tsv", "conformance\t**failed** with status 101\ngoldens\tpassed, 7 s\n");
    write("conformance.log", FAILED_LOG);
    write("goldens.log", "test result: ok. 6 passed; 0 failed; 0 ignored; finished in 7.00s\n");
    write("collectives.log", "error: could not compile `collectives`\n");
    write("doctor.log", &format!("cache {}/cache\n", folder.path().display()));
    let arguments = [folder.path().to_str().unwrap(), "2026-11-29, commit 0123abc"];
    let script = "deploy/first_day_report.py";
    let Some(output) = python(script, &arguments, &search_path()) else { return };
    let report = text(&output.stdout);
    for part in [
        "# First day on AMD GPUs\n\n2026-11-29, commit 0123abc\n\n| step | result |\n|---|---|\n",
        "| conformance | **failed** with status 101 |\n| goldens | passed, 7 s |\n",
        "## conformance\n\n```\ntest result: FAILED. 1 passed; 1 failed;",
        "Failed tests:\n\n- `norm::tails_agree`\n",
        "thread 'norm::tails_agree' (812) panicked at kernels/tests/gpu/norm.rs:41:9:\n\
         assertion failed: error 0.5 > 0.008\n```",
        "## goldens\n\n```\ntest result: ok. 6 passed; 0 failed; 0 ignored; finished in 7.00s\n```",
        "## collectives\n\n```\nerror: could not compile `collectives`\n```",
        "## doctor\n\n```\ncache OUT/cache\n```",
    ] {
        assert!(report.contains(part), "{part}\n\nis missing in\n\n{report}");
    }
    assert!(!report.contains("RUST_BACKTRACE"), "{report}");
}

#[test]
fn first_day_script_is_valid_bash() {
    let mut bash = Command::new("bash");
    assert!(run_to_end(bash.arg("-n").arg(at("deploy/first_day_amd.sh"))).status.success());
}
