//! Tests of traces of an executor, on the CPU and on the emulated GPU, eager and replayed.

use super::scheduler_harness::{HarnessRequest, SchedulerHarness, config};
use super::{gpu_config, with_few_slots};
use executor::{ExecutorConfig, ModelDtype};
use protocol::{ExecutorSettings, SamplingParams};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Tolerance in microseconds for comparisons of event times. The times in the trace file are rounded
/// separately to 0.001 microseconds.
const ROUNDING_US: f64 = 0.0021;

fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("traces-{name}"));
    let _ = std::fs::remove_dir_all(&folder);
    let _ = std::fs::remove_file(&folder); // Left by an earlier run.
    folder
}

fn traced(config: ExecutorConfig, name: &str) -> SchedulerHarness {
    let settings = ExecutorSettings { profile_dir: Some(folder(name)), ..config.settings };
    SchedulerHarness::with(ExecutorConfig { settings, ..config })
}

/// Runs a prompt in two chunks, then `decodes` decode steps. Returns the number of steps.
fn play(harness: &mut SchedulerHarness, id: u64, decodes: usize) -> usize {
    let mut request = HarnessRequest::new(id, 24, SamplingParams::greedy());
    for len in [20, 4].into_iter().chain(std::iter::repeat_n(1, decodes)) {
        harness.step(&mut [request.chunk(len)]);
    }
    let blocks = request.preempt(0);
    harness.free(blocks);
    2 + decodes
}

/// Returns the trace events of a trace file.
fn events(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    let whole: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
    assert_eq!(whole["otherData"]["rank"], "0");
    whole["traceEvents"].as_array().unwrap().clone()
}

fn of<'a>(events: &'a [Value], kind: &str) -> Vec<&'a Value> {
    events.iter().filter(|event| event["cat"] == kind).collect()
}

/// Start and end of an event in microseconds.
fn span(event: &Value) -> (f64, f64) {
    let from = event["ts"].as_f64().unwrap();
    (from, from + event["dur"].as_f64().unwrap())
}

/// Checks that the spans of each track are nested or disjoint, in the order in which they are written.
fn check_nesting(events: &[Value]) {
    let mut open: BTreeMap<u64, Vec<(f64, f64)>> = BTreeMap::new();
    for event in events.iter().filter(|event| event["ph"] == "X") {
        let (from, to) = span(event);
        let stack = open.entry(event["tid"].as_u64().unwrap()).or_default();
        while stack.last().is_some_and(|outer| from >= outer.1 - ROUNDING_US) {
            stack.pop();
        }
        if let Some(outer) = stack.last() {
            let inside = from >= outer.0 - ROUNDING_US && to <= outer.1 + ROUNDING_US;
            assert!(inside, "{event} is not inside {outer:?}");
        }
        stack.push((from, to));
    }
}

/// Returns the kernel families of the kernel events within the time span of the event `step`.
fn families(events: &[Value], step: &Value) -> BTreeSet<String> {
    let (from, to) = span(step);
    let inside = |event: &&&Value| {
        let (a, b) = span(event);
        a >= from - ROUNDING_US && b <= to + ROUNDING_US
    };
    let family = |event: &Value| event["args"]["family"].as_str().unwrap().to_owned();
    of(events, "kernel").iter().filter(inside).map(|event| family(event)).collect()
}

/// Checks the properties that every trace has. Returns the instrumented steps with their kernel families.
fn check(path: &Path, steps: usize) -> Vec<(Option<u64>, BTreeSet<String>)> {
    let events = events(path);
    let found = of(&events, "step");
    assert_eq!(found.len(), steps, "steps on the device");
    for pair in found.windows(2) {
        assert_eq!(pair[1]["args"]["step"], pair[0]["args"]["step"].as_u64().unwrap() + 1);
        assert!(span(pair[1]).0 >= span(pair[0]).1 - ROUNDING_US, "device steps do not overlap");
    }
    let host = of(&events, "host");
    for name in ["stage", "submit", "wait", "answer"] {
        assert_eq!(host.iter().filter(|event| event["name"] == name).count(), steps, "{name}");
    }
    check_nesting(&events);
    let instrumented = found.into_iter().filter(|step| step["args"]["marked"] == true);
    instrumented.map(|step| (step["args"]["graph"].as_u64(), families(&events, step))).collect()
}

fn set(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

#[test]
fn cpu_trace_shows_step_stages() {
    let mut harness = traced(with_few_slots(config(ModelDtype::Float32, 2)), "cpu");
    play(&mut harness, 1, 2); // No trace has been started.
    let trace = harness.executor.begin_trace().unwrap();
    let steps = play(&mut harness, 2, 18);
    std::thread::sleep(Duration::from_millis(600));
    assert_eq!(
        of(&events(trace.path()), "step").len(),
        steps,
        "steps are on disk before the trace ends"
    );
    harness.executor.end_trace();
    play(&mut harness, 3, 1);
    trace.close().unwrap();
    let instrumented = check(trace.path(), steps);
    let parts = set(&["upload", "prepare", "forward", "head", "sampling", "download"]);
    assert_eq!(instrumented, [(None, parts)], "the second step, where the prompt ends");
    let next = harness.executor.begin_trace().unwrap();
    assert_ne!(next.path(), trace.path());
    let steps = play(&mut harness, 4, 1);
    next.close().unwrap();
    check(next.path(), steps);
}

#[test]
fn trace_without_folder_is_rejected() {
    let mut harness = SchedulerHarness::with(with_few_slots(config(ModelDtype::Float32, 1)));
    let error = harness.executor.begin_trace().unwrap_err().to_string();
    assert!(error.contains("--profile"), "{error}");
    let mut unwritable = traced(with_few_slots(config(ModelDtype::Float32, 1)), "unwritable");
    std::fs::write(folder("unwritable"), "a file").unwrap();
    let error = unwritable.executor.begin_trace().unwrap_err().to_string();
    assert!(error.contains("traces-unwritable"), "{error}");
}

#[test]
fn gpu_trace_shows_kernels_eager_and_replayed() {
    let mut harness = traced(gpu_config(64, ModelDtype::Bfloat16, false), "gpu");
    let trace = harness.executor.begin_trace().unwrap();
    let steps = play(&mut harness, 1, 3);
    trace.close().unwrap();
    let instrumented = check(trace.path(), steps);
    let layers = ["embedding", "norms", "linear layers", "RoPE and KV write"];
    let around = ["upload", "prepare", "download"];
    let [(None, launched), (Some(1), replayed)] = &instrumented[..] else {
        panic!("{instrumented:?}")
    };
    let has = |families: &BTreeSet<String>, names: &[&str]| {
        for name in names {
            assert!(families.contains(*name), "{name} is not in {families:?}");
        }
        assert!(!families.contains("other"), "{families:?}");
    };
    has(launched, &layers);
    has(launched, &around);
    has(launched, &["attention prefill", "head", "sampling"]);
    has(replayed, &["embedding", "linear layers", "RoPE and KV write"]);
    has(replayed, &around);
    has(replayed, &["attention decode", "head", "sampling"]);
}
