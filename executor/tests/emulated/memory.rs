//! A start: what it tells, and that all memory of the device is reserved before the executor is ready.

use super::experts::sharing;
use super::player::{Job, Player, config};
use super::{experts, gpu_config, on_emulator, quantised};
use executor::{Dtype, Executor, ExecutorConfig, KvDtype, KvSize};
use protocol::{Phase, Sampling, Settings};
use std::process::Command;

const SEATS: u64 = 8;
const LONGEST: u32 = 512;

/// Chunks of many lengths beside decodes, then as many decodes as there are seats, one of a long context.
fn play(player: &mut Player) {
    let rules = Sampling { logprobs: Some(3), temperature: 0.7, ..Sampling::greedy() };
    let prompt = |id| if id == 0 { 480 } else { 9 + id as usize };
    let mut jobs: Vec<Job> = (0..SEATS).map(|id| Job::new(id, prompt(id), rules.clone())).collect();
    jobs[2].masked = true; // Its steps ask only after the forward pass.
    for (turn, len) in [40, 17, 90, 100, 3, 64, 1, 90, 75].into_iter().enumerate() {
        let others = 1 + turn % 3;
        let lens = jobs.iter().map(|job| job.want().min(7)).skip(1).take(others);
        let lens: Vec<usize> = std::iter::once(len).chain(lens).collect();
        let mut rows: Vec<(&mut Job, usize)> = jobs.iter_mut().zip(lens).collect();
        rows.sort_by_key(|(_, len)| *len > 1); // Decode rows come first.
        player.step(&mut rows);
    }
    while jobs.iter().any(|job| job.want() > 1) {
        let lens: Vec<usize> = jobs.iter().map(|job| job.want().min(15)).collect();
        let mut rows: Vec<(&mut Job, usize)> = jobs.iter_mut().zip(lens).collect();
        rows.sort_by_key(|(_, len)| *len > 1);
        player.step(&mut rows);
    }
    for _ in 0..2 {
        player.step(&mut jobs.iter_mut().map(|job| (job, 1)).collect::<Vec<_>>());
    }
}

#[test]
fn a_start_tells_how_far_compilers_are() {
    let mut executor = Executor::load(gpu_config(64, Dtype::Bfloat16, true), &mut |_| {}).unwrap();
    let mut news = Vec::new();
    executor.warm_up(&mut |progress| news.push(progress)).unwrap();
    let compiled: Vec<_> = news.iter().filter(|p| p.phase == Phase::Compile).collect();
    assert!(compiled.len() > 5 && compiled.is_sorted_by_key(|p| p.done), "{news:?}");
    let last = compiled[compiled.len() - 1];
    assert_eq!((last.done, last.total), (compiled.len() as u64, compiled.len() as u64));
    assert!(news.is_sorted_by_key(|p| p.phase == Phase::WarmUp), "before the first pass: {news:?}");
}

#[test]
fn nothing_is_allocated_once_ready() {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "memory::the_steps", "--ignored", "--test-threads", "1"])
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success() && told.contains("1 passed"), "{told}");
}

#[test]
#[ignore = "needs the device's memory for itself, so a process: started by the test above"]
fn the_steps() {
    let bf16 = |wave, eager| on_emulator(wave, config(Dtype::Bfloat16, 2), eager);
    let in_fp8 = |of| quantised(of, KvDtype::Fp8);
    let fp8 = |wave, eager| on_emulator(wave, in_fp8(config(Dtype::Bfloat16, 2)), eager);
    let moe = |wave, eager| on_emulator(wave, experts(Dtype::Bfloat16), eager);
    let fp8_moe = |wave, eager| on_emulator(wave, in_fp8(experts(Dtype::Bfloat16)), eager);
    let sharing = |wave, eager| on_emulator(wave, sharing(Dtype::Bfloat16, 64), eager);
    let models: [(_, &dyn Fn(u32, bool) -> ExecutorConfig); 5] = [
        ("bf16", &bf16),
        ("fp8", &fp8),
        ("experts", &moe),
        ("fp8 experts", &fp8_moe),
        ("shared experts", &sharing),
    ];
    for (name, model) in models {
        // What one wave size or one way to launch takes, another may: two of the four for each model.
        for (wave, eager) in [(64, true), (32, false)] {
            takes_nothing(model(wave, eager), &format!("{name}, wave {wave}, eager: {eager}"));
        }
    }
    takes_nothing(bf16(64, false), "bf16, wave 64, replayed");
}

fn takes_nothing(config: ExecutorConfig, what: &str) {
    let settings = Settings {
        max_model_len: LONGEST,
        kv_tokens_min: LONGEST,
        tokens_per_step: 128,
        kv: KvSize::Blocks(64),
        ..config.settings
    };
    let mut player = Player::with(ExecutorConfig { settings, ..config });
    player.executor.warm_up(&mut |_| {}).unwrap();
    player.executor.size_kv(64, &mut |_| {}).unwrap();
    let free = player.executor.memory_free_bytes();
    play(&mut player);
    let taken = free - player.executor.memory_free_bytes();
    assert_eq!(taken, 0, "{what}: bytes taken while serving");
}

/// A device with room for some recordings, or none, has a shorter list of them, or none: other steps run launch by launch, with the same tokens.
#[test]
fn recordings_that_find_no_memory_are_left_out() {
    if !crate::in_turn(1) {
        return;
    }
    for (each, name) in
        [("400M", "memory::with_room_for_two"), ("2G", "memory::with_room_for_none")]
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
fn with_room_for_two() {
    records(&[4, 8]);
}

#[test]
#[ignore = "as the one above"]
fn with_room_for_none() {
    records(&[]);
}

fn records(rows: &[u32]) {
    let launched = crate::play(&mut Player::with(gpu_config(64, Dtype::Float32, true)));
    let mut recorded = Player::with(gpu_config(64, Dtype::Float32, false));
    assert_eq!(recorded.graphs, rows);
    assert_eq!(crate::play(&mut recorded), launched);
}
