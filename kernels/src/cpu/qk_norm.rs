//! QK norm over all heads and attention temperature on the CPU: parallel over rows, computed in f32, rounded once
//! when stored.

use device::{DeviceError, FloatElement, MatMut, MatRef};

use super::backend::for_float;
use super::elementwise::min_rows;
use super::maths::sum_by;
use super::row_kernel::{RowKernel, dispatch};
use super::shared_rows::SharedRows;
use crate::cpu::CpuBackend;
use crate::{CpuKernel, QkChannelCounts, QkFullNorm, QkSquareSums, QueryTemperatureScaling};

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

/// Row kernel: multiplies the queries of a token by the attention temperature of its position, in place.
struct QueryRowScaling<'a, T> {
    x: &'a mut [T],
    factor: f32,
}

impl<T: FloatElement> RowKernel for QueryRowScaling<'_, T> {
    #[inline(always)]
    fn run(self) {
        for x in self.x {
            *x = T::store(x.load() * self.factor);
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

    fn temperature_of<T: FloatElement>(&self, op: &mut QueryTemperatureScaling<'_>) {
        let isa = self.isa();
        let (factors, positions): (&[f32], &[i32]) = (op.factors.row(0), op.positions.row(0));
        let (rows, query) = (op.qkv.rows(), op.query);
        let out = SharedRows::<T>::new(&mut op.qkv);
        self.threads().split(rows, 1, min_rows(query), &|range| {
            for r in range {
                let factor = factors[positions[r] as usize];
                // SAFETY: each row belongs to one thread.
                dispatch(isa, QueryRowScaling { x: unsafe { out.part(r, 0, query) }, factor });
            }
        });
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

impl CpuKernel for QueryTemperatureScaling<'_> {
    fn run(mut self, cpu: &CpuBackend) -> Result<(), DeviceError> {
        self.check()?;
        for_float!("attention_temperature", self.qkv.dtype(), T => cpu.temperature_of::<T>(&mut self));
        Ok(())
    }
}
