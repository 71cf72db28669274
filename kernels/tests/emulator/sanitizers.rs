//! Kernels under AddressSanitizer with UndefinedBehaviorSanitizer, and under ThreadSanitizer: correct kernels
//! give no report, and bugs that do not change the results are detected. Skipped if the compiler has no
//! sanitizers.

use crate::child_process::{KernelSanitizer, passed, sanitized, text};
use crate::correct_kernels::values;
use crate::gpu::{EmulatedGpu, KernelArg, LaunchShape};
use crate::injected_bugs::{
    ATTENTION, AttentionBugCase, LAST_BARRIER, ROWS, WARPS, inject_bug, reduction_bug, sums_error,
};

/// Runs an ignored test of this file under a sanitizer; `None` if the sanitizer is not available.
fn run(name: &str, sanitizer: KernelSanitizer, seed: u64) -> Option<std::process::Output> {
    sanitized(&format!("sanitizers::{name}"), sanitizer, seed)
}

/// Panics unless the sanitizer ended the child with this report.
fn caught(name: &str, sanitizer: KernelSanitizer, seed: u64, report: &str) {
    let Some(output) = run(name, sanitizer, seed) else { return };
    let text = text(&output);
    assert_eq!(output.status.code(), Some(66), "{text}");
    assert!(text.contains(report), "{text}");
}

#[test]
#[ignore = "run by correct_kernels_are_clean"]
fn correct_kernels() {
    let gpu = EmulatedGpu::open();
    for (wave, waves) in WARPS {
        let case = AttentionBugCase::new(&gpu);
        let attention = gpu.kernel(ATTENTION, &[wave], "paged_attention");
        let [sums, product] = gpu.kernels(ROWS, &[wave], ["sums_twice", "product"]);
        let n = 2000;
        let (a, b) = (gpu.upload(&values(n)), gpu.upload(&values(n)));
        for seed in [0, 3] {
            gpu.seed(seed);
            assert!(case.error(&gpu, attention, waves) < 1e-4);
            assert!(sums_error(&gpu, sums) < 1e-3);
            let y = gpu.alloc(4 * n);
            let args =
                [KernelArg::At(y), KernelArg::At(a), KernelArg::At(b), KernelArg::U32(n as u32)];
            gpu.launch(product, LaunchShape(4, 256, 0), &args);
            assert!(gpu.download::<f32>(y).iter().all(|v| v.is_finite()));
        }
    }
}

#[test]
fn correct_kernels_are_clean() {
    for (sanitizer, seed) in
        [(KernelSanitizer::Address, 3), (KernelSanitizer::Thread, 0), (KernelSanitizer::Thread, 3)]
    {
        if let Some(output) = run("correct_kernels", sanitizer, seed) {
            passed(&output);
        }
    }
}

/// Launches the attention kernel with an injected bug, with four warps.
fn attention_bug(from: &str, to: &str) {
    let gpu = EmulatedGpu::open();
    let kernel =
        gpu.kernel(&inject_bug(ATTENTION, from, to), &["-DWARP_SIZE=64"], "paged_attention");
    AttentionBugCase::new(&gpu).error(&gpu, kernel, 4);
}

#[test]
#[ignore = "run by a_key_beyond_the_pool_is_caught"]
fn key_beyond_the_pool() {
    attention_bug("query[i] * keys[at + ", "query[i] * keys[at + 21 * 16 * D + ");
}

#[test]
fn a_key_beyond_the_pool_is_caught() {
    caught("key_beyond_the_pool", KernelSanitizer::Address, 0, "heap-buffer-overflow");
}

#[test]
#[ignore = "run by too_little_shared_memory_is_caught"]
fn too_little_shared_memory() {
    attention_bug("parts + warp_id() * ROW;", "parts + (warp_id() + 1) * ROW;");
}

#[test]
fn too_little_shared_memory_is_caught() {
    caught("too_little_shared_memory", KernelSanitizer::Address, 0, "heap-buffer-overflow");
}

#[test]
#[ignore = "run by a_static_array_overrun_is_caught"]
fn static_array_overrun() {
    let gpu = EmulatedGpu::open();
    let source = inject_bug(ROWS, "last[0] = atomic", "last[tid() + 1] = atomic");
    let count = gpu.upload(&[0u32; 3]);
    gpu.launch(
        gpu.kernel(&source, &[], "count_threads"),
        LaunchShape(1, 64, 0),
        &[KernelArg::At(count)],
    );
}

#[test]
fn a_static_array_overrun_is_caught() {
    caught(
        "static_array_overrun",
        KernelSanitizer::Address,
        0,
        "runtime error: index 1 out of bounds",
    );
}

#[test]
#[ignore = "run by races_are_caught"]
fn race_after_a_reduction() {
    let gpu = EmulatedGpu::open();
    sums_error(&gpu, reduction_bug(&gpu, "-DWARP_SIZE=64", LAST_BARRIER, ""));
}

#[test]
#[ignore = "run by races_are_caught"]
fn race_before_a_merge() {
    attention_bug("    sync();  // before the merge\n", "");
}

#[test]
#[ignore = "run by races_are_caught"]
fn race_inside_a_warp() {
    let gpu = EmulatedGpu::open();
    let y = gpu.alloc(4 * 64);
    let kernel =
        gpu.kernel(&inject_bug(ROWS, "    warp_sync();  // before the swap\n", ""), &[], "swap");
    gpu.launch(kernel, LaunchShape(1, 64, 0), &[KernelArg::At(y)]);
}

#[test]
fn races_are_caught() {
    for seed in [0, 3] {
        for name in ["race_after_a_reduction", "race_before_a_merge", "race_inside_a_warp"] {
            caught(name, KernelSanitizer::Thread, seed, "ThreadSanitizer: data race");
        }
    }
}
