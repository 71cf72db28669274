//! `TensorScalarMul` and `SigmoidGatedAdd` on the CPU: parallel over rows, computed in f32, rounded once when stored.

use device::{DeviceError, FloatElement, MatMut, MatRef};

use super::backend::for_float;
use super::elementwise::min_rows;
use super::row_kernel::{RowKernel, dispatch};
use super::shared_rows::SharedRows;
use crate::cpu::CpuBackend;
use crate::{CpuKernel, SigmoidGatedAdd, TensorScalarMul};

/// Row kernel: multiplies a row by a factor, in place.
struct RowScaling<'a, T> {
    x: &'a mut [T],
    factor: f32,
}

impl<T: FloatElement> RowKernel for RowScaling<'_, T> {
    #[inline(always)]
    fn run(self) {
        for x in self.x {
            *x = T::store(x.load() * self.factor);
        }
    }
}

/// Row kernel: adds a gated row in place, `y = y + share · x`, where `share` is the sigmoid of the gate.
struct GatedAddition<'a, T> {
    y: &'a mut [T],
    x: &'a [T],
    /// Sigmoid of the gate.
    share: f32,
}

impl<T: FloatElement> RowKernel for GatedAddition<'_, T> {
    #[inline(always)]
    fn run(self) {
        for (y, x) in self.y.iter_mut().zip(self.x) {
            *y = T::store(self.share.mul_add(x.load(), y.load()));
        }
    }
}

impl CpuBackend {
    fn scale_of<T: FloatElement>(&self, x: &mut MatMut<'_>, factor: f32) {
        let (rows, cols, isa) = (x.rows(), x.cols(), self.isa());
        let out = SharedRows::<T>::new(x);
        self.threads().split(rows, 1, min_rows(cols), &|range| {
            for r in range {
                // SAFETY: each row belongs to one thread.
                dispatch(isa, RowScaling { x: unsafe { out.row(r) }, factor });
            }
        });
    }

    fn gated_add_of<T: FloatElement>(&self, y: &mut MatMut<'_>, x: MatRef<'_>, gate: MatRef<'_>) {
        let isa = self.isa();
        let out = SharedRows::<T>::new(y);
        self.threads().split(x.rows(), 1, min_rows(x.cols()), &|range| {
            for r in range {
                let share = 1.0 / (1.0 + (-gate.row::<f32>(r)[0]).exp());
                // SAFETY: each row belongs to one thread.
                dispatch(isa, GatedAddition { y: unsafe { out.row(r) }, x: x.row(r), share });
            }
        });
    }
}

impl CpuKernel for TensorScalarMul<'_> {
    fn run(self, cpu: &CpuBackend) -> Result<(), DeviceError> {
        let Self { mut x, factor } = self;
        for_float!("scale", x.dtype(), T => cpu.scale_of::<T>(&mut x, factor));
        Ok(())
    }
}

impl CpuKernel for SigmoidGatedAdd<'_> {
    fn run(self, cpu: &CpuBackend) -> Result<(), DeviceError> {
        self.check()?;
        let Self { mut y, x, gate } = self;
        for_float!("gated_add", y.dtype(), T => cpu.gated_add_of::<T>(&mut y, x, gate));
        Ok(())
    }
}
