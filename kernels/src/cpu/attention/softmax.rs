//! Online softmax of one key tile: scores to probabilities, running maximum and sum.

use super::super::maths::{exp, sum_by};
use super::super::row_kernel::RowKernel;
use super::KEY_TILE;
use crate::dtype::Float;

/// Running state of one query.
#[derive(Debug, Clone, Copy)]
pub(super) struct Running {
    pub(super) max: f32,
    pub(super) sum: f32,
}

impl Running {
    pub(super) const EMPTY: Self = Self { max: f32::NEG_INFINITY, sum: 0.0 };
}

/// One query, one key tile.
pub(super) struct OneTile<'a, T> {
    pub(super) scores: &'a [f32; KEY_TILE],
    /// Probabilities under the new maximum; zero for keys the query does not see.
    pub(super) probabilities: &'a mut [T; KEY_TILE],
    pub(super) running: &'a mut Running,
    /// Output so far, rescaled to the new maximum.
    pub(super) out: &'a mut [f32],
    /// Keys of the tile at or before the query.
    pub(super) visible: usize,
    pub(super) scale: f32,
}

impl<T: Float> RowKernel for OneTile<'_, T> {
    #[inline(always)]
    fn run(self) {
        if self.visible == 0 {
            *self.probabilities = [T::store(0.0); KEY_TILE];
            return;
        }
        let mut scores = [f32::NEG_INFINITY; KEY_TILE];
        for (j, (masked, score)) in scores.iter_mut().zip(self.scores).enumerate() {
            *masked = if j < self.visible { score * self.scale } else { f32::NEG_INFINITY };
        }
        let max = largest(&scores).max(self.running.max);
        for (p, score) in self.probabilities.iter_mut().zip(&scores) {
            *p = T::store(exp(score - max));
        }
        let keep = exp(self.running.max - max);
        let sum = sum_by(self.probabilities, Float::load);
        *self.running = Running { max, sum: self.running.sum * keep + sum };
        if keep != 1.0 {
            for o in self.out {
                *o *= keep;
            }
        }
    }
}

#[inline(always)]
fn largest(x: &[f32; KEY_TILE]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; 16];
    for chunk in x.as_chunks::<16>().0 {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane = if *x > *lane { *x } else { *lane };
        }
    }
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            lanes[i] = if lanes[i + half] > lanes[i] { lanes[i + half] } else { lanes[i] };
        }
    }
    lanes[0]
}

/// `y = out / sum`.
pub(super) struct Finish<'a, T> {
    pub(super) y: &'a mut [T],
    pub(super) out: &'a [f32],
    pub(super) sum: f32,
}

impl<T: Float> RowKernel for Finish<'_, T> {
    #[inline(always)]
    fn run(self) {
        for (y, o) in self.y.iter_mut().zip(self.out) {
            *y = T::store(o / self.sum);
        }
    }
}
