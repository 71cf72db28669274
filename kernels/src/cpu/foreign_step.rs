//! CPU kernel that converts the arrays of a step of a foreign host. The GPU code is `csrc/prepare/foreign_step.hip`.

use device::{DType, DeviceError, MatRef};

use crate::cpu::CpuBackend;
use crate::{CpuKernel, ForeignStepPreparation};

impl CpuKernel for ForeignStepPreparation<'_> {
    fn run(mut self, _cpu: &CpuBackend) -> Result<(), DeviceError> {
        self.check()?;
        let host = self.host;
        let (tokens, rows) = (host.ids.cols(), host.context_lens.cols());
        let is_padding =
            |t: usize| host.row_starts.is_none() && element(&host.context_lens, t) == 0;
        for t in 0..tokens {
            let padding = is_padding(t);
            let value =
                |x: &MatRef<'_>, of_padding| if padding { of_padding } else { element(x, t) };
            let (id, position) = (value(&host.ids, 0), value(&host.positions, 0));
            let slot = value(&host.slots, -1);
            self.step.ids.row_mut::<i32>(0)[t] = id as i32;
            self.step.positions.row_mut::<i32>(0)[t] = position as i32;
            self.step.slots.row_mut::<i64>(0)[t] = slot;
        }
        for r in 0..rows {
            self.step.context_lens.row_mut::<i32>(0)[r] = element(&host.context_lens, r) as i32;
        }
        for r in 0..=rows {
            let start = host.row_starts.map_or(r as i32, |starts| starts.row::<i32>(0)[r]);
            self.step.cu_q.row_mut::<i32>(0)[r] = start;
        }
        Ok(())
    }
}

/// Element `i` of a vector of 32-bit or 64-bit integers.
fn element(x: &MatRef<'_>, i: usize) -> i64 {
    match x.dtype() {
        DType::I64 => x.row::<i64>(0)[i],
        _ => i64::from(x.row::<i32>(0)[i]),
    }
}
