//! The scripts that check machine code and compare its counters have tests of their own, in Python.

use crate::emulated_gpu::bounded_child::run_to_end;
use std::path::Path;
use std::process::Command;

#[test]
fn scripts_that_check_machine_code_pass_their_tests() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let mut tests = Command::new("python3");
    tests.args(["-B", "-m", "unittest", "discover", "-p", "*_test.py", "-s"]).arg(&folder);
    let output = run_to_end(&mut tests);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && !text.contains("Ran 0 tests"), "{text}");
}
