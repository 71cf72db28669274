//! Runs tests in a separate process, under a sanitizer or with another configuration of the emulated GPU. The
//! child runs an ignored test of this executable, which can also be run directly with `--ignored`.

use crate::emulated_gpu::bounded_child::{run_to_end, run_within};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::time::Duration;

/// Timeout of a test in a child process, also under a sanitizer on a machine under load.
const CHILD_TEST_TIMEOUT: Duration = Duration::from_mins(30);

/// Runs the ignored test `name` in a child process with additional environment variables.
pub(crate) fn run(name: &str, variables: &BTreeMap<&str, &str>) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "--nocapture", "--test-threads=1", name]);
    run_within(command.envs(variables), CHILD_TEST_TIMEOUT)
}

/// A sanitizer of the C++ compiler that kernels are compiled with.
#[derive(Clone, Copy)]
pub(crate) enum KernelSanitizer {
    Address,
    Thread,
}

/// Runs the ignored test `name` with kernels compiled for a sanitizer. Returns `None` if the compiler lacks
/// it.
pub(crate) fn sanitized(name: &str, sanitizer: KernelSanitizer, seed: u64) -> Option<Output> {
    let (kind, library) = match sanitizer {
        KernelSanitizer::Address => ("address", "libasan.so"),
        KernelSanitizer::Thread => ("thread", "libtsan.so"),
    };
    let found = run_to_end(Command::new("c++").arg(format!("-print-file-name={library}")));
    let path = PathBuf::from(String::from_utf8(found.stdout).unwrap().trim());
    if !path.is_absolute() {
        return None;
    }
    let seed = seed.to_string();
    let variables = [
        ("LD_PRELOAD", path.to_str().unwrap()),
        ("HIPEMU_SANITIZE", kind),
        ("HIPEMU_SEED", &seed),
        ("ASAN_OPTIONS", "detect_leaks=0:exitcode=66"),
        // Only kernels are instrumented: ThreadSanitizer does not see the synchronisation of the test
        // harness.
        ("TSAN_OPTIONS", "exitcode=66:halt_on_error=1:ignore_noninstrumented_modules=1"),
        ("UBSAN_OPTIONS", "print_stacktrace=1:exitcode=66"),
    ];
    Some(run(name, &variables.into()))
}

/// Returns the child's stdout and stderr.
pub(crate) fn text(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

/// Panics unless the child's test ran and passed.
pub(crate) fn passed(output: &Output) {
    assert!(output.status.success() && text(output).contains("1 passed"), "{}", text(output));
}
