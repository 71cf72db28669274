//! Start-up: its progress reports, and that all device memory is reserved before the executor is ready.

use super::experts::shared_expert_model;
use super::player::{SchedulerHarness, ScriptedRequest, config};
use super::{fp8_model, gpu_config, moe_model, on_emulator};
use executor::{Executor, ExecutorConfig, KvCacheDtype, KvCacheSize, ModelDtype};
use protocol::{ExecutorSettings, SamplingParams, StartupPhase};
use std::process::Command;

const SEQ_SLOTS: u64 = 8;
const LONGEST: u32 = 512;

/// Runs chunks of many lengths next to decodes, then decodes in all sequence slots, one of them with a long
/// context.
fn play(player: &mut SchedulerHarness) {
    let rules = SamplingParams { logprobs: Some(3), temperature: 0.7, ..SamplingParams::greedy() };
    let prompt = |id| if id == 0 { 480 } else { 9 + id as usize };
    let mut jobs: Vec<ScriptedRequest> =
        (0..SEQ_SLOTS).map(|id| ScriptedRequest::new(id, prompt(id), rules.clone())).collect();
    jobs[2].masked = true; // Its steps sample only after the forward pass.
    for (turn, len) in [40, 17, 90, 100, 3, 64, 1, 90, 75].into_iter().enumerate() {
        let others = 1 + turn % 3;
        let lens = jobs.iter().map(|job| job.want().min(7)).skip(1).take(others);
        let lens: Vec<usize> = std::iter::once(len).chain(lens).collect();
        let mut rows: Vec<(&mut ScriptedRequest, usize)> = jobs.iter_mut().zip(lens).collect();
        rows.sort_by_key(|(_, len)| *len > 1); // Decode rows come first.
        player.step(&mut rows);
    }
    while jobs.iter().any(|job| job.want() > 1) {
        let lens: Vec<usize> = jobs.iter().map(|job| job.want().min(15)).collect();
        let mut rows: Vec<(&mut ScriptedRequest, usize)> = jobs.iter_mut().zip(lens).collect();
        rows.sort_by_key(|(_, len)| *len > 1);
        player.step(&mut rows);
    }
    for _ in 0..2 {
        player.step(&mut jobs.iter_mut().map(|job| (job, 1)).collect::<Vec<_>>());
    }
}

#[test]
fn startup_reports_compile_progress() {
    let mut executor =
        Executor::load(gpu_config(64, ModelDtype::Bfloat16, true), &mut |_| {}).unwrap();
    let mut news = Vec::new();
    executor.warm_up(&mut |progress| news.push(progress)).unwrap();
    let compiled: Vec<_> = news.iter().filter(|p| p.phase == StartupPhase::Compile).collect();
    assert!(compiled.len() > 5 && compiled.is_sorted_by_key(|p| p.done), "{news:?}");
    let last = compiled[compiled.len() - 1];
    assert_eq!((last.done, last.total), (compiled.len() as u64, compiled.len() as u64));
    assert!(
        news.is_sorted_by_key(|p| p.phase == StartupPhase::WarmUp),
        "before the first pass: {news:?}"
    );
}

#[test]
fn no_allocation_after_ready() {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "memory::steps_without_allocation", "--ignored", "--test-threads", "1"])
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success() && told.contains("1 passed"), "{told}");
}

#[test]
#[ignore = "needs the device's memory for itself, so a process: started by the test above"]
fn steps_without_allocation() {
    let bf16 = |wave, eager| on_emulator(wave, config(ModelDtype::Bfloat16, 2), eager);
    let in_fp8 = |of| fp8_model(of, KvCacheDtype::Fp8);
    let fp8 = |wave, eager| on_emulator(wave, in_fp8(config(ModelDtype::Bfloat16, 2)), eager);
    let moe = |wave, eager| on_emulator(wave, moe_model(ModelDtype::Bfloat16), eager);
    let fp8_moe = |wave, eager| on_emulator(wave, in_fp8(moe_model(ModelDtype::Bfloat16)), eager);
    let sharing =
        |wave, eager| on_emulator(wave, shared_expert_model(ModelDtype::Bfloat16, 64), eager);
    let models: [(_, &dyn Fn(u32, bool) -> ExecutorConfig); 5] = [
        ("bf16", &bf16),
        ("fp8", &fp8),
        ("experts", &moe),
        ("fp8 experts", &fp8_moe),
        ("shared experts", &sharing),
    ];
    for (name, model) in models {
        // Warp sizes and launch modes may need different memory: two of the four combinations per model.
        for (wave, eager) in [(64, true), (32, false)] {
            takes_nothing(model(wave, eager), &format!("{name}, wave {wave}, eager: {eager}"));
        }
    }
    takes_nothing(bf16(64, false), "bf16, wave 64, replayed");
}

fn takes_nothing(config: ExecutorConfig, what: &str) {
    let settings = ExecutorSettings {
        max_model_len: LONGEST,
        kv_tokens_min: LONGEST,
        tokens_per_step: 128,
        kv_cache_size: KvCacheSize::Blocks(64),
        ..config.settings
    };
    let mut player = SchedulerHarness::with(ExecutorConfig { settings, ..config });
    player.executor.warm_up(&mut |_| {}).unwrap();
    player.executor.size_kv(64, &mut |_| {}).unwrap();
    let free = player.executor.memory_free_bytes();
    play(&mut player);
    let taken = free - player.executor.memory_free_bytes();
    assert_eq!(taken, 0, "{what}: bytes taken while serving");
}

/// A device with memory for some graphs, or none, captures fewer: other steps are launched eagerly, with the
/// same tokens.
#[test]
fn captured_graphs_without_memory_are_skipped() {
    if !crate::is_selected_by_cursor(1) {
        return;
    }
    for (each, name) in
        [("400M", "memory::with_memory_for_two_graphs"), ("2G", "memory::with_memory_for_no_graph")]
    {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--ignored", "--test-threads", "1"])
            .env("HIPEMU_GRAPH_BYTES", each)
            .output()
            .unwrap();
        let told = String::from_utf8_lossy(&child.stdout);
        assert!(child.status.success() && told.contains("1 passed"), "{told}");
    }
}

#[test]
#[ignore = "needs a device whose recordings take memory, so a process: started by the test above"]
fn with_memory_for_two_graphs() {
    captures_graphs(&[4, 8]);
}

#[test]
#[ignore = "as the one above"]
fn with_memory_for_no_graph() {
    captures_graphs(&[]);
}

fn captures_graphs(rows: &[u32]) {
    let launched =
        crate::play(&mut SchedulerHarness::with(gpu_config(64, ModelDtype::Float32, true)));
    let mut recorded = SchedulerHarness::with(gpu_config(64, ModelDtype::Float32, false));
    assert_eq!(recorded.graphs, rows);
    assert_eq!(crate::play(&mut recorded), launched);
}
