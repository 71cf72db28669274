//! Elementwise ops on the CPU: `GatedActivation`, `TensorAdd` and `LogitSoftcap` run in parallel over rows, compute
//! in f32 and round once, when they store. `RowGather` copies rows.

use device::{
    DType, DeviceElement, DeviceError, FloatElement, MatMut, MatRef, check_dtype, check_size,
};

use super::backend::for_float;
use super::maths::{bounded, exp, gelu_tanh, silu};
use super::row_kernel::{RowKernel, dispatch};
use super::shared_rows::SharedRows;
use crate::cpu::CpuBackend;
use crate::{
    CpuKernel, GateActivation, GatedActivation, GatedProduct, LogitSoftcap,
    QueryTemperatureScaling, RowGather, SigmoidGatedAdd, TensorAdd, TensorScalarMul,
};

/// Minimum number of elements of an op for multi-threading: below it, waking the other threads costs more
/// time than they save.
pub(super) const MIN_ELEMENTS: usize = 16 * 1024;

/// Minimum number of rows for multi-threading of a row-wise kernel whose rows have `cols` columns.
pub(super) fn min_rows(cols: usize) -> usize {
    MIN_ELEMENTS.div_ceil(cols.max(1)).max(2)
}

/// Row kernel: gated activation of an MLP.
struct GatedActivationRow<'a, T> {
    y: &'a mut [T],
    gate: &'a [T],
    up: &'a [T],
    activation: GateActivation,
}

impl<T: FloatElement> GatedActivationRow<'_, T> {
    #[inline(always)]
    fn apply(self, f: impl Fn(f32, f32) -> f32) {
        for ((y, gate), up) in self.y.iter_mut().zip(self.gate).zip(self.up) {
            *y = T::store(f(gate.load(), up.load()));
        }
    }
}

impl<T: FloatElement> RowKernel for GatedActivationRow<'_, T> {
    /// The function is selected once per row, so that each loop vectorises.
    #[inline(always)]
    fn run(self) {
        match self.activation {
            GateActivation::Silu => self.apply(|gate, up| silu(gate) * up),
            GateActivation::GeluTanh => self.apply(|gate, up| gelu_tanh(gate) * up),
            GateActivation::ClampedSilu { alpha, limit } => self.apply(|gate, up| {
                let gate = bounded(gate, f32::NEG_INFINITY, limit);
                (bounded(up, -limit, limit) + 1.0) * (gate / (1.0 + exp(-alpha * gate)))
            }),
        }
    }
}

/// Row kernel: elementwise sum, `y = a + b`.
struct RowAddition<'a, T> {
    y: &'a mut [T],
    a: &'a [T],
    b: &'a [T],
}

impl<T: FloatElement> RowKernel for RowAddition<'_, T> {
    #[inline(always)]
    fn run(self) {
        for ((y, a), b) in self.y.iter_mut().zip(self.a).zip(self.b) {
            *y = T::store(a.load() + b.load());
        }
    }
}

/// Row kernel: soft-caps a row in place.
struct SoftcapRow<'a, T> {
    x: &'a mut [T],
    cap: f32,
}

impl<T: FloatElement> RowKernel for SoftcapRow<'_, T> {
    #[inline(always)]
    fn run(self) {
        for x in self.x {
            *x = T::store(self.cap * (x.load() / self.cap).tanh());
        }
    }
}

impl CpuBackend {
    fn softcap_of<T: FloatElement>(&self, x: &mut MatMut<'_>, cap: f32) {
        let (rows, cols, isa) = (x.rows(), x.cols(), self.isa());
        let out = SharedRows::<T>::new(x);
        self.threads().split(rows, 1, min_rows(cols), &|range| {
            for r in range {
                // SAFETY: each row belongs to one thread.
                dispatch(isa, SoftcapRow { x: unsafe { out.row(r) }, cap });
            }
        });
    }

    fn gated_of<T: FloatElement>(
        &self,
        y: &mut MatMut<'_>,
        x: MatRef<'_>,
        activation: GateActivation,
    ) {
        let (inner, isa) = (y.cols(), self.isa());
        let out = SharedRows::<T>::new(y);
        self.threads().split(x.rows(), 1, min_rows(inner), &|range| {
            for r in range {
                let (gate, up) = x.row::<T>(r).split_at(inner);
                // SAFETY: each row belongs to one thread.
                let y = unsafe { out.row(r) };
                dispatch(isa, GatedActivationRow { y, gate, up, activation });
            }
        });
    }

    fn gated_product_of<T: FloatElement>(&self, op: GatedProduct<'_>) {
        let GatedProduct { mut y, gate, up, activation } = op;
        let isa = self.isa();
        let out = SharedRows::<T>::new(&mut y);
        self.threads().split(gate.rows(), 1, min_rows(gate.cols()), &|range| {
            for r in range {
                // SAFETY: each row belongs to one thread.
                let y = unsafe { out.row(r) };
                dispatch(
                    isa,
                    GatedActivationRow { y, gate: gate.row(r), up: up.row(r), activation },
                );
            }
        });
    }

    fn add_of<T: FloatElement>(&self, y: &mut MatMut<'_>, a: MatRef<'_>, b: MatRef<'_>) {
        let isa = self.isa();
        let out = SharedRows::<T>::new(y);
        self.threads().split(a.rows(), 1, min_rows(a.cols()), &|range| {
            for r in range {
                // SAFETY: each row belongs to one thread.
                let y = unsafe { out.row(r) };
                dispatch(isa, RowAddition { y, a: a.row(r), b: b.row(r) });
            }
        });
    }
}

impl CpuKernel for RowGather<'_> {
    fn run(self, _cpu: &CpuBackend) -> Result<(), DeviceError> {
        const KERNEL: &str = "gather_rows";
        let Self { mut y, x, rows } = self;
        check_dtype(KERNEL, "rows", rows.dtype(), DType::I32)?;
        check_size(KERNEL, "rows", y.rows(), rows.cols())?;
        check_size(KERNEL, "columns", y.cols(), x.cols())?;
        check_dtype(KERNEL, "output", y.dtype(), x.dtype())?;
        let limit = x.rows();
        if let Some(&bad) = rows.row::<i32>(0).iter().find(|&&r| r < 0 || r as usize >= limit) {
            let (what, index) = ("row", i64::from(bad));
            return Err(DeviceError::Index { kernel: KERNEL, what, index, limit });
        }
        if x.dtype() == DType::I32 {
            copy_rows::<i32>(&mut y, x, rows.row(0));
            return Ok(());
        }
        for_float!(KERNEL, x.dtype(), T => copy_rows::<T>(&mut y, x, rows.row(0)));
        Ok(())
    }
}

impl CpuKernel for TensorAdd<'_> {
    fn run(self, cpu: &CpuBackend) -> Result<(), DeviceError> {
        const KERNEL: &str = "add";
        self.check()?;
        let Self { mut y, a, b } = self;
        for_float!(KERNEL, y.dtype(), T => cpu.add_of::<T>(&mut y, a, b));
        Ok(())
    }
}

impl CpuKernel for LogitSoftcap<'_> {
    fn run(self, cpu: &CpuBackend) -> Result<(), DeviceError> {
        let Self { mut x, cap } = self;
        for_float!("softcap", x.dtype(), T => cpu.softcap_of::<T>(&mut x, cap));
        Ok(())
    }
}

impl CpuKernel for GatedProduct<'_> {
    fn run(self, cpu: &CpuBackend) -> Result<(), DeviceError> {
        self.check()?;
        for_float!(Self::KERNEL, self.y.dtype(), T => cpu.gated_product_of::<T>(self));
        Ok(())
    }
}

impl CpuKernel for GatedActivation<'_> {
    fn run(self, cpu: &CpuBackend) -> Result<(), DeviceError> {
        const KERNEL: &str = "gated_activation";
        self.check()?;
        let Self { mut y, x, activation } = self;
        for_float!(KERNEL, x.dtype(), T => cpu.gated_of::<T>(&mut y, x, activation));
        Ok(())
    }
}

fn copy_rows<T: DeviceElement>(y: &mut MatMut<'_>, x: MatRef<'_>, rows: &[i32]) {
    for (i, &r) in rows.iter().enumerate() {
        y.row_mut::<T>(i).copy_from_slice(x.row(r as usize));
    }
}

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
    fn temperature_of<T: FloatElement>(&self, op: &mut QueryTemperatureScaling<'_>) {
        let isa = self.isa();
        let (factors, positions): (&[f32], &[i32]) = (op.factors.row(0), op.positions.row(0));
        let (rows, query) = (op.qkv.rows(), op.query);
        let out = SharedRows::<T>::new(&mut op.qkv);
        self.threads().split(rows, 1, min_rows(query), &|range| {
            for r in range {
                let factor = factors[positions[r] as usize];
                // SAFETY: each row belongs to one thread.
                dispatch(isa, RowScaling { x: unsafe { out.part(r, 0, query) }, factor });
            }
        });
    }

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

impl CpuKernel for QueryTemperatureScaling<'_> {
    fn run(mut self, cpu: &CpuBackend) -> Result<(), DeviceError> {
        self.check()?;
        for_float!("attention_temperature", self.qkv.dtype(), T => cpu.temperature_of::<T>(&mut self));
        Ok(())
    }
}
