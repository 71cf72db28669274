//! Faults of the GPU itself: it hangs, a driver call fails, or memory is exhausted. A driver library that
//! wraps the real one injects these faults on request.
//!
//! These tests are run manually on the GPU that `HADRON_GPU` names: `cuda`, or `emulated=PATH` with the path
//! of an emulator's library, with which all tests but the last one can run.

use crate::bounded_child::run_to_end;
use crate::http::executor_process::{
    complete_text, executor, finish, is_ready, stream, wait_until,
};
use crate::http::server_process::{ServerProcess, command};
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// Timeout of a request during a fault. A hung device is detected only at the step deadline; then a
/// replacement executor is started.
const TIMEOUT: Duration = Duration::from_mins(2);

/// GPU driver library that injects faults: its folder, with the files that trigger faults, and server
/// flags.
struct FaultyDriver {
    folder: tempfile::TempDir,
    flags: Vec<String>,
    /// Output length in tokens, long enough that the device needs at least a second to generate it.
    tokens: u32,
}

impl FaultyDriver {
    /// Compiles the driver library. A C compiler is installed wherever this crate is linked.
    #[allow(clippy::disallowed_methods, reason = "the GPU comes from `just`")]
    fn new() -> Self {
        let gpu = std::env::var("HADRON_GPU").unwrap_or_else(|_| panic!("HADRON_GPU names none"));
        let (device, real) = match gpu.split_once('=') {
            None if gpu == "cuda" => ("cuda", library(&["libcuda.so.1"])),
            Some(("emulated", path)) => ("rocm", path.to_owned()),
            _ => panic!("HADRON_GPU={gpu} is neither cuda nor emulated=PATH"),
        };
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().join("faulty_driver.so").to_str().unwrap().to_owned();
        let source =
            concat!(env!("CARGO_MANIFEST_DIR"), "/tests/e2e/device_faults/faulty_driver.c");
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-O1", &format!("-DREAL=\"{real}\""), "-o"]);
        compiler.arg(&at).arg(source).args((device == "cuda").then_some("-DCUDA"));
        // Functions that the compiled library does not define are resolved in the real library, which is
        // linked after it.
        let behind = Path::new(&real).parent().unwrap().display().to_string();
        compiler.arg("-Wl,--no-as-needed").arg(&real).arg(format!("-Wl,-rpath,{behind}"));
        let compiled = run_to_end(&mut compiler);
        assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
        let mut libraries = vec![at.clone()];
        if device == "cuda" {
            // The emulator's library also contains the emulated NVRTC and cuBLASLt; for CUDA, the real ones
            // are named here.
            libraries.push(library(&["libnvrtc.so.13", "libnvrtc.so.12"]));
            libraries.push(library(&["libcublasLt.so.13", "libcublasLt.so.12"]));
        }
        let libraries = libraries.join(",");
        let mut flags = vec!["--device", device, "--device-libraries", &libraries];
        if device == "rocm" {
            // An emulated GPU is slow, because the CPU computes all lanes, so steps must be small.
            flags.extend(["--max-num-batched-tokens", "16", "--max-num-seqs", "4"]);
        }
        let tokens = if device == "rocm" { 40 } else { 1_900 };
        let flags = flags.into_iter().map(str::to_owned).collect();
        Self { folder, flags, tokens }
    }

    fn inject(&self, fault: &str) {
        fs::write(self.folder.path().join(fault), "").unwrap();
    }

    fn was_injected(&self, fault: &str) -> bool {
        !self.folder.path().join(fault).exists()
    }

    /// Command of a server whose executor uses this driver library.
    fn command(&self, more: &[&str]) -> Command {
        const EXACT: &[&str] = &["--port", "0", "--executor", "process", "--dtype", "float32"];
        let flags: Vec<&str> = self.flags.iter().map(String::as_str).collect();
        let mut command = command(&[EXACT, &["--max-model-len", "2048"], &flags, more].concat());
        command.env("FAULTY_DRIVER", self.folder.path());
        command
    }
}

/// Path of the first library in `names` that the dynamic loader finds, or the last name if it finds none.
fn library(names: &[&str]) -> String {
    let output = run_to_end(Command::new("sh").args(["-c", "ldconfig -p"]));
    let text = String::from_utf8(output.stdout).unwrap();
    let path = |name: &&str| {
        let line = text.lines().find(|line| line.trim().starts_with(&format!("{name} ")))?;
        line.rsplit(" => ").next()
    };
    names.iter().find_map(path).unwrap_or(names[names.len() - 1]).to_owned()
}

/// Injects a fault while streams run; each stream must continue with unchanged tokens.
fn fault_during_streams(fault: &str) {
    let faults = FaultyDriver::new();
    let mut process =
        ServerProcess::of(&mut faults.command(&["--num-gpu-blocks-override", "1024"]));
    let (at, former) = (process.address, executor(&process));
    let expected = complete_text(at, faults.tokens);
    let streams: Vec<_> = (0..3).map(|_| stream(at, faults.tokens)).collect();
    let began = Instant::now();
    faults.inject(fault);
    let seen = wait_until(TIMEOUT, "the failure", || !is_ready(at));
    for stream in streams {
        let (text, end) = finish(stream);
        assert!(text == expected && end == "length", "{text}, {end}, for {expected}");
    }
    println!("{fault}: seen after {seen:?}, streams over after {:?}", began.elapsed());
    assert!(faults.was_injected(fault));
    assert_ne!(executor(&process), former, "another one computes");
    assert_eq!(complete_text(at, faults.tokens), expected);
    process.signal("TERM");
    assert_eq!(process.exits_within(TIMEOUT).code(), Some(0));
    let message = process.stderr_text();
    println!("{message}");
    assert!(message.contains(&format!("faulty driver: {fault}")), "it had that fault");
}

#[test]
#[ignore = "needs a GPU: `just device-faults`"]
fn hung_device_only_delays_requests() {
    fault_during_streams("wedge");
}

#[test]
#[ignore = "needs a GPU: `just device-faults`"]
fn device_error_in_a_step_only_delays_requests() {
    fault_during_streams("break");
}

#[test]
#[ignore = "needs a GPU: `just device-faults`"]
fn device_out_of_memory_fails_startup_with_numbers() {
    let faults = FaultyDriver::new();
    faults.inject("full");
    let output = run_to_end(&mut faults.command(&["--num-gpu-blocks-override", "1024"]));
    let text = String::from_utf8_lossy(&output.stderr);
    println!("{text}");
    assert!(faults.was_injected("full"));
    assert_eq!(output.status.code(), Some(1));
    assert!(text.contains("out of device memory") && text.contains(" free"));
}

#[test]
#[ignore = "needs a GPU: `just device-faults`"]
fn out_of_memory_at_graph_capture_falls_back_to_eager() {
    let faults = FaultyDriver::new();
    let blocks = ["--num-gpu-blocks-override", "1024"];
    let expected =
        complete_text(ServerProcess::of(&mut faults.command(&blocks)).address, faults.tokens);
    faults.inject("full-recording");
    let mut process = ServerProcess::of(faults.command(&blocks).env("RUST_LOG", "info"));
    assert!(faults.was_injected("full-recording"));
    assert_eq!(complete_text(process.address, faults.tokens), expected);
    process.signal("TERM");
    assert_eq!(process.exits_within(TIMEOUT).code(), Some(0));
    let text = process.stderr_text();
    println!("{text}");
    assert!(
        text.contains("no captured graph for steps of this number of rows"),
        "some are left out"
    );
}

/// GPU memory in use in MiB, as `nvidia-smi` reports it.
fn memory_in_use() -> u64 {
    let query = ["--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"];
    let output = run_to_end(Command::new("nvidia-smi").args(query));
    String::from_utf8(output.stdout).unwrap().trim().parse().unwrap()
}

#[test]
#[ignore = "needs a GPU: `just device-faults`"]
fn killed_server_frees_device_memory() {
    let faults = FaultyDriver::new();
    // The previous process that used the GPU may not have exited yet.
    wait_until(TIMEOUT, "a GPU that no process uses", || memory_in_use() < 1_000);
    let before = memory_in_use();
    let process = ServerProcess::of(&mut faults.command(&["--gpu-memory-utilization", "0.5"]));
    let stream = stream(process.address, faults.tokens);
    let serving = memory_in_use();
    process.signal("KILL");
    let freed = wait_until(TIMEOUT, "free memory", || memory_in_use() < before + 100);
    println!("{before} MiB, {serving} while it serves, {freed:?} after its end as before");
    assert!(serving > before + 1_000);
    drop(stream);
}
