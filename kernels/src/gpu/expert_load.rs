//! Kernel arguments of expert load statistics (EPLB): counters that the routing kernels increment.

use device::gpu::KernelLaunch;
use device::{DeviceError, MatRef};

use crate::ExpertLoadArgs;

/// Address of the expert load counters of one layer (null: selected experts are not counted), and address of
/// the KV slots of the tokens; used by `moe_route/count.h`.
#[derive(Debug, Clone, Copy)]
pub(super) struct ExpertCounterPtrs {
    counts: *mut u8,
    slots: *const u8,
}

impl ExpertCounterPtrs {
    /// Null addresses: the routing kernel does not count selected experts.
    pub(super) const NONE: Self = Self { counts: std::ptr::null_mut(), slots: std::ptr::null() };

    /// Returns the addresses for a router with logits `[tokens, experts]`.
    ///
    /// Errors: the counters do not match the logits.
    pub(super) fn of(
        load: Option<&mut ExpertLoadArgs<'_>>,
        kernel: &'static str,
        logits: MatRef<'_>,
    ) -> Result<Self, DeviceError> {
        let Some(load) = load else { return Ok(Self::NONE) };
        load.check(kernel, logits)?;
        let offset = load.layer * load.tokens.cols() * size_of::<i32>();
        // SAFETY: the address is the row of the layer, which was checked to exist.
        let counts = unsafe { load.tokens.as_mut_ptr().add(offset) };
        Ok(Self { counts, slots: load.slots.map_or(std::ptr::null(), |slots| slots.as_ptr()) })
    }

    /// Appends the addresses of the counters and of the KV slots as kernel arguments.
    pub(super) fn args(self, launch: KernelLaunch) -> KernelLaunch {
        launch.arg_ptr(self.counts).arg_ptr(self.slots)
    }
}
