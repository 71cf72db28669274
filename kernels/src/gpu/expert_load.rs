//! Where kernels that route count what they choose.

use device::gpu::KernelLaunch;
use device::{DeviceError, MatRef};

use crate::ExpertLoadArgs;

/// Counters of a layer and slots of its tokens, as `moe_route/count.h` takes them; null where nobody counts.
#[derive(Debug, Clone, Copy)]
pub(super) struct ExpertCounterPtrs {
    counts: *mut u8,
    slots: *const u8,
}

impl ExpertCounterPtrs {
    /// Nobody counts.
    pub(super) const NONE: Self = Self { counts: std::ptr::null_mut(), slots: std::ptr::null() };

    /// For a router's `logits [T, E]`; what does not fit them is refused.
    pub(super) fn of(
        count: Option<&mut ExpertLoadArgs<'_>>,
        kernel: &'static str,
        logits: MatRef<'_>,
    ) -> Result<Self, DeviceError> {
        let Some(count) = count else { return Ok(Self::NONE) };
        count.check(kernel, logits)?;
        let before = count.layer * count.tokens.cols() * size_of::<i32>();
        // SAFETY: the layer's row, which was checked to exist.
        let counts = unsafe { count.tokens.as_mut_ptr().add(before) };
        Ok(Self { counts, slots: count.slots.map_or(std::ptr::null(), |slots| slots.as_ptr()) })
    }

    /// The two arguments.
    pub(super) fn args(self, launch: KernelLaunch) -> KernelLaunch {
        launch.arg_ptr(self.counts).arg_ptr(self.slots)
    }
}
