//! `RmsNorm`, `AddRmsNorm`, `QkFullNorm` and `ValueHeadNorm` on the CPU, parallel over rows.
//!
//! `y = w · cast(x · rsqrt(mean(x²) + eps))`: the normalised row is rounded to the activation type before the
//! multiplication by the weight, as in transformers for Llama and Qwen; the product is rounded when it is
//! stored. An f32 weight is multiplied in f32 without the first rounding, as in transformers for Gemma and
//! gpt-oss.

use device::{DType, DeviceError, FloatElement, MatMut, MatRef};

use super::backend::for_float;
use super::elementwise::min_rows;
use super::maths::sum_by;
use super::row_kernel::{RowKernel, dispatch};
use super::shared_rows::SharedRows;
use crate::cpu::CpuBackend;
use crate::{
    AddRmsNorm, CpuKernel, QkChannelCounts, QkFullNorm, QkSquareSums, RmsNorm, ValueHeadNorm,
};

const KERNEL: &str = "rms_norm";

/// Row kernel: RMS norm of one row.
pub(super) struct RmsNormRow<'a, T, W> {
    pub(super) y: &'a mut [T],
    pub(super) x: &'a [T],
    pub(super) w: &'a [W],
    pub(super) eps: f32,
}

impl<T: FloatElement, W: FloatElement> RowKernel for RmsNormRow<'_, T, W> {
    #[inline(always)]
    fn run(self) {
        let scale = inverse_rms(self.x, self.eps);
        for ((y, x), w) in self.y.iter_mut().zip(self.x).zip(self.w) {
            *y = normed(*x, scale, *w);
        }
    }
}

/// Returns one element of a normalised row.
#[inline(always)]
pub(super) fn normed<T: FloatElement, W: FloatElement>(x: T, scale: f32, w: W) -> T {
    let unit = x.load() * scale;
    let unit = if W::DTYPE == DType::F32 { unit } else { T::store(unit).load() };
    T::store(w.load() * unit)
}

/// Row kernel: adds `delta` to `x`, then computes the RMS norm of the sum.
struct AddRmsNormRow<'a, T, W> {
    y: &'a mut [T],
    x: &'a mut [T],
    delta: &'a [T],
    w: &'a [W],
    eps: f32,
}

impl<T: FloatElement, W: FloatElement> RowKernel for AddRmsNormRow<'_, T, W> {
    #[inline(always)]
    fn run(self) {
        for (x, delta) in self.x.iter_mut().zip(self.delta) {
            *x = T::store(x.load() + delta.load());
        }
        RmsNormRow { y: self.y, x: self.x, w: self.w, eps: self.eps }.run();
    }
}

/// `1 / sqrt(mean(x²) + eps)`.
#[inline(always)]
pub(super) fn inverse_rms<T: FloatElement>(x: &[T], eps: f32) -> f32 {
    let squares = sum_by(x, |x| x.load() * x.load());
    1.0 / (squares / x.len() as f32 + eps).sqrt()
}

impl CpuBackend {
    fn norm_of<T: FloatElement, W: FloatElement>(&self, op: RmsNorm<'_>) {
        let RmsNorm { mut y, x, weight, eps } = op;
        let (isa, w) = (self.isa(), weight.row::<W>(0));
        let out = SharedRows::<T>::new(&mut y);
        self.threads().split(x.rows(), 1, min_rows(x.cols()), &|range| {
            for r in range {
                // SAFETY: each row belongs to one thread.
                let y = unsafe { out.row(r) };
                dispatch(isa, RmsNormRow { y, x: x.row(r), w, eps });
            }
        });
    }

    fn add_norm_of<T: FloatElement, W: FloatElement>(&self, op: AddRmsNorm<'_>) {
        let AddRmsNorm { mut y, mut x, delta, weight, eps } = op;
        let (isa, rows, w) = (self.isa(), x.rows(), weight.row::<W>(0));
        let min = min_rows(x.cols());
        let (out, residual) = (SharedRows::<T>::new(&mut y), SharedRows::<T>::new(&mut x));
        self.threads().split(rows, 1, min, &|range| {
            for r in range {
                // SAFETY: each row of both matrices belongs to one thread.
                let (y, x) = unsafe { (out.row(r), residual.row(r)) };
                dispatch(isa, AddRmsNormRow { y, x, delta: delta.row(r), w, eps });
            }
        });
    }
}

impl CpuKernel for AddRmsNorm<'_> {
    fn run(self, cpu: &CpuBackend) -> Result<(), DeviceError> {
        self.check()?;
        for_float!(KERNEL, self.x.dtype(), T => match self.weight.dtype() {
            DType::F32 => cpu.add_norm_of::<T, f32>(self),
            _ => cpu.add_norm_of::<T, T>(self),
        });
        Ok(())
    }
}

impl CpuKernel for RmsNorm<'_> {
    fn run(self, cpu: &CpuBackend) -> Result<(), DeviceError> {
        self.check()?;
        for_float!(KERNEL, self.x.dtype(), T => match self.weight.dtype() {
            DType::F32 => cpu.norm_of::<T, f32>(self),
            _ => cpu.norm_of::<T, T>(self),
        });
        Ok(())
    }
}

/// Row kernel: sum of the squares of a row.
struct SquareSum<'a, T> {
    sum: &'a mut f32,
    x: &'a [T],
}

impl<T: FloatElement> RowKernel for SquareSum<'_, T> {
    #[inline(always)]
    fn run(self) {
        *self.sum = sum_by(self.x, |x| x.load() * x.load());
    }
}

/// Row kernel: multiplies the channels of a row by `scale` and by the norm weights, in place.
struct ChannelNormalization<'a, T> {
    x: &'a mut [T],
    weight: &'a [T],
    /// Inverse RMS of the queries or keys, by which the channels are multiplied.
    scale: f32,
}

impl<T: FloatElement> RowKernel for ChannelNormalization<'_, T> {
    #[inline(always)]
    fn run(self) {
        for (x, weight) in self.x.iter_mut().zip(self.weight) {
            *x = T::store(weight.load() * (x.load() * self.scale));
        }
    }
}

impl CpuBackend {
    fn square_sums_of<T: FloatElement>(
        &self,
        sums: &mut MatMut<'_>,
        qkv: MatRef<'_>,
        channels: QkChannelCounts,
    ) {
        let isa = self.isa();
        let QkChannelCounts { query, key } = channels;
        let out = SharedRows::<f32>::new(sums);
        self.threads().split(qkv.rows(), 1, min_rows(query + key), &|range| {
            for r in range {
                let row: &[T] = qkv.row(r);
                // SAFETY: each row belongs to one thread.
                let (q, k) = unsafe { out.row(r) }.split_at_mut(1);
                dispatch(isa, SquareSum { sum: &mut q[0], x: &row[..query] });
                dispatch(isa, SquareSum { sum: &mut k[0], x: &row[query..query + key] });
            }
        });
    }

    fn full_norm_of<T: FloatElement>(&self, op: &mut QkFullNorm<'_>) {
        let isa = self.isa();
        let QkChannelCounts { query, key } = op.channels;
        let (ranks, eps, sums) = (op.ranks, op.eps, op.sums);
        let (query_weight, key_weight) = op.weight.row::<T>(0).split_at(query);
        let rows = op.qkv.rows();
        let out = SharedRows::<T>::new(&mut op.qkv);
        self.threads().split(rows, 1, min_rows(query + key), &|range| {
            for r in range {
                let sums: &[f32] = sums.row(r);
                let scale =
                    |i: usize, count: usize| 1.0 / (sums[i] / (count * ranks) as f32 + eps).sqrt();
                // SAFETY: each row belongs to one thread.
                let x = unsafe { out.part(r, 0, query + key) };
                let (q, k) = x.split_at_mut(query);
                dispatch(
                    isa,
                    ChannelNormalization { x: q, weight: query_weight, scale: scale(0, query) },
                );
                dispatch(
                    isa,
                    ChannelNormalization { x: k, weight: key_weight, scale: scale(1, key) },
                );
            }
        });
    }
}

/// Row kernel: RMS norm of one head without weights, in place.
struct HeadNormalization<'a, T> {
    x: &'a mut [T],
    eps: f32,
}

impl<T: FloatElement> RowKernel for HeadNormalization<'_, T> {
    #[inline(always)]
    fn run(self) {
        let scale = inverse_rms(self.x, self.eps);
        for x in self.x {
            *x = T::store(x.load() * scale);
        }
    }
}

impl CpuBackend {
    fn value_norm_of<T: FloatElement>(&self, op: ValueHeadNorm<'_>) {
        let ValueHeadNorm { mut qkv, first, heads, head_dim, eps } = op;
        let (rows, isa) = (qkv.rows(), self.isa());
        let out = SharedRows::<T>::new(&mut qkv);
        self.threads().split(rows, 1, min_rows(heads * head_dim), &|range| {
            for r in range {
                // SAFETY: each row belongs to one thread.
                let values = unsafe { out.part(r, first, heads * head_dim) };
                for x in values.chunks_mut(head_dim) {
                    dispatch(isa, HeadNormalization { x, eps });
                }
            }
        });
    }
}

impl CpuKernel for ValueHeadNorm<'_> {
    fn run(self, cpu: &CpuBackend) -> Result<(), DeviceError> {
        self.check()?;
        for_float!(Self::KERNEL, self.qkv.dtype(), T => cpu.value_norm_of::<T>(self));
        Ok(())
    }
}

impl CpuKernel for QkSquareSums<'_> {
    fn run(self, cpu: &CpuBackend) -> Result<(), DeviceError> {
        self.check()?;
        let Self { mut sums, qkv, channels } = self;
        for_float!("qk_square_sums", qkv.dtype(), T => cpu.square_sums_of::<T>(&mut sums, qkv, channels));
        Ok(())
    }
}

impl CpuKernel for QkFullNorm<'_> {
    fn run(mut self, cpu: &CpuBackend) -> Result<(), DeviceError> {
        self.check()?;
        for_float!("qk_full_norm", self.qkv.dtype(), T => cpu.full_norm_of::<T>(&mut self));
        Ok(())
    }
}
