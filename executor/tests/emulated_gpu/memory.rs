//! Tests of start-up on a GPU: progress reports, and the reservation of all device memory before the executor
//! is ready.

use super::CHILD_TEST_TIMEOUT;
use super::emulated_gpu::bounded_child::run_within;
use super::experts::shared_expert_model;
use super::scheduler_harness::{
    HarnessRequest, SchedulerHarness, config, recurrent_model, window_model, with_mtp,
};
use super::{chunks_of, fp8_model, gpu_config, moe_model, on_emulator};
use executor::{Executor, ExecutorConfig, KvCacheDtype, KvCacheSize, ModelDtype};
use protocol::{ExecutorSettings, SamplingParams, StartupPhase};
use std::process::Command;

const SEQ_SLOTS: u64 = 8;
const LONGEST: u32 = 512;
/// Blocks of all KV groups: with windows and MTP modules, 70 are needed.
const KV_BLOCKS: u32 = 96;

/// Runs prompt chunks of various lengths in batches with decode rows, then decode steps in all sequence
/// slots, with `drafts` draft tokens. One request has a long context.
fn play(harness: &mut SchedulerHarness, drafts: u8) {
    let rules = SamplingParams { logprobs: Some(3), temperature: 0.7, ..SamplingParams::greedy() };
    let prompt = |id| if id == 0 { 480 } else { 9 + id as usize };
    let mut requests: Vec<HarnessRequest> =
        (0..SEQ_SLOTS).map(|id| HarnessRequest::new(id, prompt(id), rules.clone())).collect();
    // Steps with a masked row sample after the forward pass. With recurrent states such a row needs a state slot more.
    requests[2].masked = harness.states.is_empty();
    for request in &mut requests {
        request.drafts = drafts;
    }
    for (turn, len) in [40, 17, 90, 100, 3, 64, 1, 90, 75].into_iter().enumerate() {
        let others = 1 + turn % 3;
        let lens = requests.iter().map(|request| request.remaining().min(7)).skip(1).take(others);
        let lens: Vec<usize> = std::iter::once(len).chain(lens).collect();
        let mut rows = chunks_of(&mut requests, lens);
        rows.sort_by_key(|chunk| chunk.len > 1); // Decode rows come first.
        harness.step(&mut rows);
    }
    while requests.iter().any(|request| request.remaining() > 1) {
        let lens: Vec<usize> = requests.iter().map(|request| request.remaining().min(15)).collect();
        let mut rows = chunks_of(&mut requests, lens);
        rows.sort_by_key(|chunk| chunk.len > 1);
        harness.step(&mut rows);
    }
    for _ in 0..2 {
        harness.step(&mut requests.iter_mut().map(|request| request.chunk(1)).collect::<Vec<_>>());
    }
}

#[test]
fn startup_reports_compile_progress() {
    let mut executor =
        Executor::load(gpu_config(64, ModelDtype::Bfloat16, true), &mut |_| {}).unwrap();
    let mut reports = Vec::new();
    executor.warm_up(&mut |progress| reports.push(progress)).unwrap();
    let compiled: Vec<_> = reports.iter().filter(|p| p.phase == StartupPhase::Compile).collect();
    assert!(compiled.len() > 5 && compiled.is_sorted_by_key(|p| p.done), "{reports:?}");
    let last = compiled[compiled.len() - 1];
    assert_eq!((last.done, last.total), (compiled.len() as u64, compiled.len() as u64));
    assert!(
        reports.is_sorted_by_key(|p| p.phase == StartupPhase::WarmUp),
        "before the first pass: {reports:?}"
    );
}

#[test]
fn no_allocation_after_ready() {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "memory::steps_without_allocation", "--ignored", "--test-threads", "1"]);
    let child = run_within(&mut child, CHILD_TEST_TIMEOUT);
    let stdout = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success() && stdout.contains("1 passed"), "{stdout}");
}

#[test]
#[ignore = "child process, because it needs all memory of the device: started by no_allocation_after_ready"]
fn steps_without_allocation() {
    for ServedModel { name, config } in served_models() {
        // The memory requirement may depend on the warp size and on the launch mode (eager or graphs); each
        // model runs two of the four combinations.
        for (warp_size, eager) in [(64, true), (32, false)] {
            check_no_allocation(
                on_emulator(warp_size, config.clone(), eager),
                &format!("{name}, warp size {warp_size}, eager: {eager}"),
            );
        }
    }
    let bf16 = on_emulator(64, config(ModelDtype::Bfloat16, 2), false);
    check_no_allocation(bf16, "bf16, warp size 64, replayed");
}

/// Model of `steps_without_allocation`.
struct ServedModel {
    name: &'static str,
    config: ExecutorConfig,
}

fn served_models() -> Vec<ServedModel> {
    const BF16: ModelDtype = ModelDtype::Bfloat16;
    let in_fp8 = |of| fp8_model(of, KvCacheDtype::Fp8);
    let model = |name, config| ServedModel { name, config };
    vec![
        model("recurrent states", chunked_model()),
        model("recurrent states, MTP", with_mtp(chunked_model(), 3)),
        model("windows", window_model(BF16)),
        model("bf16", config(BF16, 2)),
        model("fp8", in_fp8(config(BF16, 2))),
        model("experts", moe_model(BF16)),
        model("fp8 experts", in_fp8(moe_model(BF16))),
        model("shared experts", shared_expert_model(BF16, 64)),
    ]
}

/// Returns a model with recurrent states whose prompts are computed in chunks.
fn chunked_model() -> ExecutorConfig {
    let mut config = recurrent_model(ModelDtype::Bfloat16);
    let delta = config.model.gated_delta.as_mut().unwrap();
    (delta.key_dim, delta.value_dim) = (64, 64);
    config
}

fn check_no_allocation(config: ExecutorConfig, what: &str) {
    let settings = ExecutorSettings {
        max_model_len: LONGEST,
        kv_tokens_min: LONGEST,
        tokens_per_step: 128,
        kv_cache_size: KvCacheSize::Blocks(KV_BLOCKS),
        ..config.settings
    };
    let drafts = settings.speculative.map_or(0, |speculative| speculative.draft_tokens);
    let mut harness = SchedulerHarness::with(ExecutorConfig { settings, ..config });
    harness.executor.warm_up(&mut |_| {}).unwrap();
    harness.executor.size_kv(KV_BLOCKS, &mut |_| {}).unwrap();
    let counts = |executor: &Executor| {
        [executor.memory_free_bytes(), executor.loaded_kernel_modules() as u64]
    };
    let before = counts(&harness.executor);
    play(&mut harness, drafts);
    let after = counts(&harness.executor);
    assert_eq!(after, before, "{what}: free bytes and loaded modules, after and before serving");
}

/// If device memory suffices only for some of the graphs or for none, the other graphs are not captured.
/// Steps without a graph are launched eagerly and sample the same tokens.
#[test]
fn captured_graphs_without_memory_are_skipped() {
    if !crate::is_selected_by_cursor(1, crate::SHARDS) {
        return;
    }
    for (each, name) in
        [("400M", "memory::with_memory_for_two_graphs"), ("2G", "memory::with_memory_for_no_graph")]
    {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", name, "--ignored", "--test-threads", "1"]);
        let child = run_within(child.env("HIPEMU_GRAPH_BYTES", each), CHILD_TEST_TIMEOUT);
        let stdout = String::from_utf8_lossy(&child.stdout);
        assert!(child.status.success() && stdout.contains("1 passed"), "{stdout}");
    }
}

#[test]
#[ignore = "child process, because its captured graphs need a device of their own: started by captured_graphs_without_memory_are_skipped"]
fn with_memory_for_two_graphs() {
    captures_graphs(&[4, 8]);
}

#[test]
#[ignore = "started by captured_graphs_without_memory_are_skipped"]
fn with_memory_for_no_graph() {
    captures_graphs(&[]);
}

fn captures_graphs(rows: &[u32]) {
    let launched =
        crate::play(&mut SchedulerHarness::with(gpu_config(64, ModelDtype::Float32, true)));
    let mut captured = SchedulerHarness::with(gpu_config(64, ModelDtype::Float32, false));
    assert_eq!(captured.graphs, rows);
    assert_eq!(crate::play(&mut captured), launched);
}
