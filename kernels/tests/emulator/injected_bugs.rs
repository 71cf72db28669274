//! Kernels with injected bugs: each bug must be detected by a wrong value, a violation of the emulator's
//! rules, or a sanitizer.

use hip_runtime_sys::DriverPtr;

use crate::child_process;
use crate::correct_kernels::values;
use crate::gpu::{EmulatedGpu, EmulatedMemory, KernelArg, LaunchShape};

const D: usize = 128;
const LENS: [usize; 3] = [1, 37, 100];
const BLOCK_TOKENS: usize = 16;
const BLOCKS_PER_ROW: usize = 7;

/// Inputs of the attention kernel in `kernels/attention.hip`, and its expected output.
pub(crate) struct AttentionBugCase {
    inputs: [EmulatedMemory; 5],
    want: Vec<f64>,
}

impl AttentionBugCase {
    pub(crate) fn new(gpu: &EmulatedGpu) -> Self {
        let blocks = LENS.len() * BLOCKS_PER_ROW;
        let q = values(LENS.len() * D);
        let kv = values(2 * blocks * BLOCK_TOKENS * D);
        let (keys, vals) = kv.split_at(blocks * BLOCK_TOKENS * D);
        let table: Vec<u32> = (0..blocks as u32).map(|i| i * 5 % blocks as u32).collect();
        let row = |s: usize, t: usize| {
            let block = table[s * BLOCKS_PER_ROW + t / BLOCK_TOKENS] as usize;
            (block * BLOCK_TOKENS + t % BLOCK_TOKENS) * D
        };
        let mut want = Vec::new();
        for (s, &len) in LENS.iter().enumerate() {
            let dot =
                |at: usize| (0..D).map(|i| f64::from(q[s * D + i] * keys[at + i])).sum::<f64>();
            let weights: Vec<f64> = (0..len).map(|t| (dot(row(s, t)) * 0.25).exp()).collect();
            let total: f64 = weights.iter().sum();
            let value = |t: usize, i: usize| weights[t] / total * f64::from(vals[row(s, t) + i]);
            want.extend((0..D).map(|i| (0..len).map(|t| value(t, i)).sum::<f64>()));
        }
        let lens = LENS.map(|l| l as u32);
        let inputs = [
            gpu.upload(&q),
            gpu.upload(keys),
            gpu.upload(vals),
            gpu.upload(&table),
            gpu.upload(&lens),
        ];
        Self { inputs, want }
    }

    /// Launches the attention kernel with 256 threads and returns the largest error of the output; infinity
    /// if an output is NaN.
    pub(crate) fn error(&self, gpu: &EmulatedGpu, kernel: DriverPtr, waves: u32) -> f64 {
        let out = gpu.alloc(4 * LENS.len() * D);
        let [q, keys, vals, table, lens] = self.inputs.map(KernelArg::At);
        let sizes = [
            KernelArg::U32(BLOCK_TOKENS as u32),
            KernelArg::U32(BLOCKS_PER_ROW as u32),
            KernelArg::F32(0.25),
        ];
        let args: Vec<KernelArg> =
            [KernelArg::At(out), q, keys, vals, table, lens].into_iter().chain(sizes).collect();
        gpu.launch(kernel, LaunchShape(LENS.len() as u32, 256, waves * (D as u32 + 2) * 4), &args);
        let got = gpu.download::<f32>(out);
        let error = |(g, w): (&f32, &f64)| (f64::from(*g) - w).abs();
        let worst = got.iter().zip(&self.want).map(error);
        worst.fold(0.0, |worst, e| if e.is_nan() { f64::INFINITY } else { worst.max(e) })
    }
}

pub(crate) const ROWS: &str = include_str!("kernels/rows.hip");
pub(crate) const ATTENTION: &str = include_str!("kernels/attention.hip");
/// For each of the two warp sizes: the compiler option that selects it, and the number of warps in 256
/// threads.
pub(crate) const WARPS: [(&str, u32); 2] = [("-DWARP_SIZE=64", 4), ("-DWARP_SIZE=32", 8)];
const COLS: usize = 777;

/// Replaces `from`, which must occur exactly once in `text`, by `to`.
pub(crate) fn inject_bug(text: &str, from: &str, to: &str) -> String {
    assert_eq!(text.matches(from).count(), 1, "no unique match to inject the bug at: {from}");
    text.replace(from, to)
}

/// Returns the kernel `sums_twice` compiled with a change in the block reduction of `dev/collective.h`.
pub(crate) fn reduction_bug(gpu: &EmulatedGpu, wave: &str, from: &str, to: &str) -> DriverPtr {
    let edit = |name: &str, text: &str| match name {
        "dev/collective.h" => inject_bug(text, from, to),
        _ => text.to_owned(),
    };
    let image = gpu.try_compile(ROWS, &[wave], edit);
    gpu.function(gpu.load(&image.unwrap_or_else(|log| panic!("{log}"))), "sums_twice")
}

/// Returns the largest error of `sums_twice` over three rows of random values.
pub(crate) fn sums_error(gpu: &EmulatedGpu, kernel: DriverPtr) -> f64 {
    let x = values(3 * COLS);
    let (input, y) = (gpu.upload(&x), gpu.upload(&[0f32; 6]));
    gpu.launch(
        kernel,
        LaunchShape(3, 256, 0),
        &[KernelArg::At(y), KernelArg::At(input), KernelArg::U32(COLS as u32)],
    );
    let got = gpu.download::<f32>(y);
    let sum = |row: &[f32], power: i32| row.iter().map(|v| f64::from(*v).powi(power)).sum::<f64>();
    let want = x.chunks(COLS).flat_map(|row| [sum(row, 1), sum(row, 2)]);
    let errors = got.iter().zip(want).map(|(g, w)| (f64::from(*g) - w).abs());
    errors.fold(0.0, |worst, e| if e.is_nan() { f64::INFINITY } else { worst.max(e) })
}

/// Returns whether at least one order of warps gives a wrong result.
fn some_order_is_wrong(gpu: &EmulatedGpu, error: impl Fn() -> f64) -> bool {
    (0..8).any(|seed| {
        gpu.seed(seed);
        error() > 1e-3
    })
}

pub(crate) const FIRST_BARRIER: &str = "    sync();\n    T r = parts[0];";
pub(crate) const LAST_BARRIER: &str = "    sync();  // The next reduction writes the same parts.\n";

#[test]
fn a_missing_barrier_in_a_reduction_is_caught() {
    let gpu = EmulatedGpu::open();
    for (wave, _) in WARPS {
        let kernel = reduction_bug(&gpu, wave, FIRST_BARRIER, "    T r = parts[0];");
        assert!(some_order_is_wrong(&gpu, || sums_error(&gpu, kernel)));
    }
}

#[test]
fn a_missing_barrier_after_a_reduction_is_caught() {
    let gpu = EmulatedGpu::open();
    for (wave, _) in WARPS {
        let kernel = reduction_bug(&gpu, wave, LAST_BARRIER, "");
        assert!(some_order_is_wrong(&gpu, || sums_error(&gpu, kernel)));
    }
}

#[test]
fn a_missing_barrier_before_a_merge_is_caught() {
    let gpu = EmulatedGpu::open();
    let case = AttentionBugCase::new(&gpu);
    for (wave, waves) in WARPS {
        let source = inject_bug(ATTENTION, "    sync();  // before the merge\n", "");
        let kernel = gpu.kernel(&source, &[wave], "paged_attention");
        assert!(some_order_is_wrong(&gpu, || case.error(&gpu, kernel, waves)));
    }
}

/// Runs a test whose kernel violates a rule of the emulator, in a child process; returns the child's output.
fn rule_violation(name: &str) -> String {
    let output = child_process::run(
        &format!("injected_bugs::{name}"),
        &[("HIPEMU_PROGRESS_TIMEOUT_MS", "300")].into(),
    );
    child_process::passed(&output);
    child_process::text(&output)
}

/// Checks that a launch fails, and that the device is then unusable: all later calls return the same error.
fn launch_fails(source: &str, name: &str, shape: LaunchShape, more: &[KernelArg]) {
    let gpu = EmulatedGpu::open();
    let (input, y) = (gpu.upload(&values(3 * COLS)), gpu.alloc(3 * 2 * 4));
    let kernel = gpu.kernel(source, &[], name);
    let args = [[KernelArg::At(y), KernelArg::At(input)].as_slice(), more].concat();
    assert_eq!(gpu.try_launch(kernel, shape, &args), 719);
    assert_eq!(gpu.synchronize(), 719);
}

#[test]
#[ignore = "run by a_divergent_collective_is_caught"]
fn divergent_collective() {
    let bug = "if (tid() < 100) sum = block_sum(sum);";
    let source = inject_bug(ROWS, "sum = block_sum(sum);", bug);
    launch_fails(&source, "row_sum", LaunchShape(3, 256, 0), &[KernelArg::U32(COLS as u32)]);
}

#[test]
fn a_divergent_collective_is_caught() {
    let text = rule_violation("divergent_collective");
    assert!(text.contains("kernel row_sum, block (0,0,0)"), "{text}");
    assert!(text.contains("wave collective after lanes of the wave returned"), "{text}");
}

#[test]
#[ignore = "run by divergent_lanes_in_collectives_are_caught"]
fn different_collectives() {
    let bug = "sum = lane() < 7 ? warp_sum(sum) :\n warp_sum(-sum);";
    let source = inject_bug(ROWS, "sum = block_sum(sum);", bug);
    launch_fails(&source, "row_sum", LaunchShape(3, 256, 0), &[KernelArg::U32(COLS as u32)]);
}

#[test]
fn divergent_lanes_in_collectives_are_caught() {
    let text = rule_violation("different_collectives");
    assert!(text.contains("lanes of one wave are at different collectives"), "{text}");
}

#[test]
#[ignore = "run by a_return_before_a_barrier_is_caught"]
fn return_before_barrier() {
    let source = inject_bug(
        ROWS,
        "sum = block_sum(sum);",
        "if (warp_id() == 1) return; sum = block_sum(sum);",
    );
    launch_fails(&source, "row_sum", LaunchShape(3, 256, 0), &[KernelArg::U32(COLS as u32)]);
}

#[test]
fn a_return_before_a_barrier_is_caught() {
    let text = rule_violation("return_before_barrier");
    assert!(text.contains("block barrier after threads of the block returned"), "{text}");
}

#[test]
#[ignore = "run by a_tile_that_is_not_aligned_is_caught"]
fn tile_not_aligned() {
    let gpu = EmulatedGpu::open();
    let source = inject_bug(
        include_str!("kernels/matrix.hip"),
        "SHARED(half_x8, row_pieces, 16 * 3);",
        "SHARED(half_t, row_pieces, 16 * 24);",
    );
    let [c, a, b] = [256 * 4, 256 * 2, 256 * 2].map(|bytes| KernelArg::At(gpu.alloc(bytes)));
    let kernel = gpu.kernel(&source, &[], "tile_loads");
    assert_eq!(gpu.try_launch(kernel, LaunchShape(1, 64, 0), &[c, a, b]), 719);
}

#[test]
fn a_tile_that_is_not_aligned_is_caught() {
    let text = rule_violation("tile_not_aligned");
    assert!(text.contains("rows of a tile are not aligned to 16 bytes"), "{text}");
}

#[test]
#[ignore = "run by deadlock_is_caught"]
fn deadlock() {
    let gpu = EmulatedGpu::open();
    let token = gpu.upload(&[77u32]);
    let kernel = gpu.kernel(ROWS, &[], "hand_on");
    assert_eq!(gpu.try_launch(kernel, LaunchShape(2, 64, 0), &[KernelArg::At(token)]), 719);
}

#[test]
#[ignore = "run by long_wait_is_not_a_deadlock"]
fn long_wait() {
    let gpu = EmulatedGpu::open();
    let turns = gpu.upload(&[0u32; 2]);
    let kernel = gpu.kernel(ROWS, &["-DWARP_SIZE=64"], "take_turns");
    gpu.launch(kernel, LaunchShape(1, 128, 0), &[KernelArg::At(turns), KernelArg::U32(100)]);
    assert_eq!(gpu.download::<u32>(turns), [100; 2]);
}

#[test]
fn long_wait_is_not_a_deadlock() {
    // With a progress timeout of zero, the emulator reports a deadlock at the first check in which no warp or
    // block has progressed since the previous check.
    let output = child_process::run(
        "injected_bugs::long_wait",
        &[("HIPEMU_PROGRESS_TIMEOUT_MS", "0")].into(),
    );
    child_process::passed(&output);
}

#[test]
fn deadlock_is_caught() {
    let text = rule_violation("deadlock");
    assert!(text.contains("no progress: deadlock"), "{text}");
}
