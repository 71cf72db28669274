//! Online softmax of one key tile: converts scores to probabilities, and updates the running maximum and sum.

use device::{CpuIsa, FloatElement};

use super::super::maths::{exp, largest, sum};
use super::super::row_kernel::{RowKernel, dispatch};
use super::KEY_TILE;

/// Running maximum and sum of the online softmax of one query.
#[derive(Debug, Clone, Copy)]
pub(super) struct RunningSoftmax {
    pub(super) max: f32,
    pub(super) sum: f32,
}

impl RunningSoftmax {
    pub(super) const EMPTY: Self = Self { max: f32::NEG_INFINITY, sum: 0.0 };
}

/// Row kernel: online softmax of one key tile for all queries of a query tile.
pub(super) struct KeyTileSoftmax<'a, T: FloatElement> {
    pub(super) scores: &'a [[f32; KEY_TILE]],
    /// Unnormalised probabilities `exp(score − new maximum)`, rounded to `T`; zero for masked keys.
    pub(super) probabilities: &'a mut [[T::MatmulOperand; KEY_TILE]],
    pub(super) running: &'a mut [RunningSoftmax],
    /// Unnormalised outputs, rescaled to the new maximum; rows are `out_stride` elements apart.
    pub(super) out: &'a mut [f32],
    pub(super) out_stride: usize,
    /// Number of keys of the key tile that each query attends to: the keys at or before the position of the
    /// query.
    pub(super) visible: &'a [usize],
    /// Number of keys at the start of the key tile that each query does not attend to, because they are
    /// before its window.
    pub(super) hidden: &'a [usize],
    pub(super) scale: f32,
}

impl<T: FloatElement> RowKernel for KeyTileSoftmax<'_, T> {
    #[inline(always)]
    fn run(self) {
        let outs = self.out.chunks_exact_mut(self.out_stride);
        let rows = self.scores.iter().zip(self.probabilities).zip(self.running).zip(outs);
        let bounds = self.hidden.iter().zip(self.visible);
        for ((((scores, probabilities), running), out), (&hidden, &visible)) in rows.zip(bounds) {
            if visible <= hidden {
                *probabilities = [T::MatmulOperand::store(0.0); KEY_TILE];
                continue;
            }
            let mut masked = [0.0f32; KEY_TILE];
            for j in 0..KEY_TILE {
                let score = scores[j] * self.scale;
                masked[j] = if j >= hidden && j < visible { score } else { f32::NEG_INFINITY };
            }
            let max = largest(&masked).max(running.max);
            let mut weights = [0.0f32; KEY_TILE];
            for j in 0..KEY_TILE {
                weights[j] = T::store(exp(masked[j] - max)).load();
            }
            for j in 0..KEY_TILE {
                probabilities[j] = T::MatmulOperand::truncate(weights[j]);
            }
            let rescale = exp(running.max - max);
            *running = RunningSoftmax { max, sum: running.sum * rescale + sum(&weights) };
            if rescale != 1.0 {
                for o in out {
                    *o *= rescale;
                }
            }
        }
    }
}

/// Computes the softmax of one key tile with the fastest implementation for `isa`.
pub(super) fn softmax_key_tile<T: FloatElement>(isa: CpuIsa, tile: KeyTileSoftmax<'_, T>) {
    match isa {
        // SAFETY: `CpuDevice::new` rejects an instruction set that the processor lacks.
        #[cfg(target_arch = "x86_64")]
        CpuIsa::Avx512 | CpuIsa::Avx512Bf16 => unsafe { super::softmax_x86::run(tile) },
        _ => dispatch(isa, tile),
    }
}

/// Row kernel: divides an output by its softmax sum, `y = out / sum`. With a sink of score `s`, the sum is
/// extended by `exp(s − max)`; both are scaled to the maximum of `max` and `s`, so that neither overflows.
pub(super) struct OutputNormalization<'a, T> {
    pub(super) y: &'a mut [T],
    pub(super) out: &'a [f32],
    pub(super) sum: f32,
    /// Maximum score, to which `out` and `sum` are scaled.
    pub(super) max: f32,
    /// Score of the sink.
    pub(super) sink: Option<f32>,
}

impl<T: FloatElement> RowKernel for OutputNormalization<'_, T> {
    #[inline(always)]
    fn run(self) {
        let Some(sink) = self.sink else {
            for (y, o) in self.y.iter_mut().zip(self.out) {
                *y = T::store(o / self.sum);
            }
            return;
        };
        let max = self.max.max(sink);
        let rescale = exp(self.max - max);
        let sum = self.sum * rescale + exp(sink - max);
        for (y, o) in self.y.iter_mut().zip(self.out) {
            *y = T::store(o * rescale / sum);
        }
    }
}
