//! Bugs planted on purpose: each must be caught, by a wrong value, a broken rule, or a sanitizer.

use hip_runtime_sys::Ptr;

use crate::clean::values;
use crate::gpu::{Arg, Gpu, Memory, Shape};

const D: usize = 128;
const LENS: [usize; 3] = [1, 37, 100];
const BLOCK_TOKENS: usize = 16;
const BLOCKS_PER_ROW: usize = 7;

/// Inputs of the attention kernel in `kernels/attention.hip`, and what it should answer.
pub(crate) struct AttentionCase {
    inputs: [Memory; 5],
    want: Vec<f64>,
}

impl AttentionCase {
    pub(crate) fn new(gpu: &Gpu) -> Self {
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

    /// Launches with 256 threads and returns the largest error; infinite for NaN.
    pub(crate) fn error(&self, gpu: &Gpu, kernel: Ptr, wave: &str) -> f64 {
        let waves = if wave.ends_with("64") { 4 } else { 8 };
        let out = gpu.alloc(4 * LENS.len() * D);
        let [q, keys, vals, table, lens] = self.inputs.map(Arg::At);
        let sizes =
            [Arg::U32(BLOCK_TOKENS as u32), Arg::U32(BLOCKS_PER_ROW as u32), Arg::F32(0.25)];
        let args: Vec<Arg> =
            [Arg::At(out), q, keys, vals, table, lens].into_iter().chain(sizes).collect();
        gpu.launch(kernel, Shape(LENS.len() as u32, 256, waves * (D as u32 + 2) * 4), &args);
        let got = gpu.download::<f32>(out);
        let error = |(g, w): (&f32, &f64)| (f64::from(*g) - w).abs();
        let worst = got.iter().zip(&self.want).map(error);
        worst.fold(0.0, |worst, e| if e.is_nan() { f64::INFINITY } else { worst.max(e) })
    }
}
