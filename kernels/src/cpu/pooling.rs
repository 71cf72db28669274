//! Sums of hidden states on the CPU. Single-threaded, since the additions take a small part of the step time.

use device::{DeviceError, FloatElement, MatMut, MatRef};

use super::backend::for_float;
use crate::cpu::CpuBackend;
use crate::{CpuKernel, HiddenStateSum};

impl CpuKernel for HiddenStateSum<'_> {
    fn run(self, _cpu: &CpuBackend) -> Result<(), DeviceError> {
        self.check()?;
        let Self { mut sums, x, cu_q, seq_slots, continues } = self;
        let (cu_q, continues) = (cu_q.row::<i32>(0), continues.row::<i32>(0));
        for (r, &slot) in seq_slots.row::<i32>(0).iter().enumerate() {
            let slot = index(slot, sums.rows(), "sequence slot")?;
            let [first, end] = [cu_q[r], cu_q[r + 1]];
            let tokens = index(first, x.rows() + 1, "token")?..index(end, x.rows() + 1, "token")?;
            if continues[r] == 0 {
                sums.row_mut::<f32>(slot).fill(0.0);
            }
            for t in tokens {
                for_float!(Self::KERNEL, x.dtype(), T => add_row::<T>(&mut sums, slot, x, t));
            }
        }
        Ok(())
    }
}

/// Adds row `t` of `x` to row `slot` of the sums.
fn add_row<T: FloatElement>(sums: &mut MatMut<'_>, slot: usize, x: MatRef<'_>, t: usize) {
    for (sum, x) in sums.row_mut::<f32>(slot).iter_mut().zip(x.row::<T>(t)) {
        *sum += x.load();
    }
}

fn index(index: i32, limit: usize, what: &'static str) -> Result<usize, DeviceError> {
    let kernel = HiddenStateSum::KERNEL;
    let valid = usize::try_from(index).ok().filter(|&index| index < limit);
    valid.ok_or(DeviceError::Index { kernel, what, index: index.into(), limit })
}
