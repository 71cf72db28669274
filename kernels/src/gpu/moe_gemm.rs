//! Grouped GEMMs of expert MLPs over row-major weights, as in the checkpoint.

use device::gpu::{KernelLaunch, KernelSource};
use device::{DeviceError, DeviceStream, check_size};

use super::gemm::{SmallMStripLaunch, TILE_OUTPUTS};
use super::moe_call::{KERNEL, MoeLaunchArgs, SMALL_M_ROWS};
use super::mxfp4;
use crate::gpu::GpuBackend;

static GEMM_SMALL_M: KernelSource = kernel_source!("moe_gemm_small_m/moe_gemm_small_m.hip");
static GROUPED_GEMM: KernelSource = kernel_source!("moe_grouped_gemm/moe_grouped_gemm.hip");
static PLAIN: KernelSource = kernel_source!("moe_plain/moe_plain.hip");

const THREADS: u32 = 256;

impl GpuBackend {
    /// Launches the grouped GEMM for few tokens per expert. `first`: true for the gate and up projection,
    /// false for the down projection.
    pub(super) fn moe_gemm_small_m(
        &self,
        s: &DeviceStream,
        call: &MoeLaunchArgs<'_>,
        first: bool,
    ) -> Result<(), DeviceError> {
        let (group, k) = call.gemm_weights(first);
        let shape =
            self.small_m_strips(SMALL_M_ROWS, group.n(), k, call.max_active_experts(), first);
        let Some(SmallMStripLaunch { strips, blocks, shared_bytes }) = shape else {
            // Not reached: `choose_kernel` selects this kernel only if the rows of a segment fit into shared
            // memory.
            return check_size(KERNEL, "input features of the small-M GEMM", k, 0);
        };
        let mut defines = call.gemm_defines(first);
        defines.push(("TILES", strips as u32));
        let kernel = self.kernel(&GEMM_SMALL_M, "moe_gemm_small_m", &defines)?;
        let grid = [blocks as u32, call.max_segments() as u32, 1];
        let launch = KernelLaunch::new(kernel, grid, THREADS, shared_bytes as u32);
        let launch = call.append_bias(call.gemm_args(launch, first), first);
        // SAFETY: `check` compared all shapes; scratch memory was allocated for the sizes of `call`.
        unsafe { launch.overlaps_predecessor().launch(self, s) }
    }

    /// Launches the grouped GEMM for many tokens per expert, in tiles of `rows` rows of x. `first`: true for
    /// the gate and up projection, false for the down projection.
    pub(super) fn moe_grouped_gemm(
        &self,
        s: &DeviceStream,
        call: &MoeLaunchArgs<'_>,
        rows: usize,
        first: bool,
    ) -> Result<(), DeviceError> {
        let mut defines = call.gemm_defines(first);
        defines.push(("TILE_M", rows as u32));
        let (group, k) = call.gemm_weights(first);
        let matrix_bytes = group.n() * mxfp4::row_bytes(k);
        if group.is_mxfp4() && u32::try_from(matrix_bytes).is_err() {
            // The kernel has offsets of 32 bits in a matrix (gemm/tile_mxfp4.h).
            return check_size(KERNEL, "bytes of an MXFP4 matrix", matrix_bytes, u32::MAX as usize);
        }
        let kernel = self.kernel(&GROUPED_GEMM, "moe_grouped_gemm", &defines)?;
        let blocks = group.n().div_ceil(TILE_OUTPUTS);
        let grid = [blocks as u32, call.max_segments() as u32, 1];
        let launch = KernelLaunch::new(kernel, grid, THREADS, self.tile_bytes(rows));
        let launch = call.append_bias(call.gemm_args(launch, first), first);
        // SAFETY: `check` compared all shapes; scratch memory was allocated for the sizes of `call`.
        unsafe { launch.overlaps_predecessor().launch(self, s) }
    }

    /// Launches the unoptimised kernel `moe_plain`, which supports every type and size. `first`: true for the
    /// gate and up projection, false for the down projection.
    pub(super) fn moe_gemm_plain(
        &self,
        s: &DeviceStream,
        call: &MoeLaunchArgs<'_>,
        first: bool,
    ) -> Result<(), DeviceError> {
        let ([act], [gated, gate, alpha, limit]) = (call.act(), call.gate_defines(first));
        let (group, k) = call.gemm_weights(first);
        let kernel = self.kernel(&PLAIN, "moe_plain", &[act, gated, gate, alpha, limit])?;
        let outputs = if first { call.inner } else { call.hidden };
        let blocks = outputs.div_ceil((THREADS / self.warp_size()) as usize);
        let launch =
            KernelLaunch::new(kernel, [call.routed_pairs as u32, blocks as u32, 1], THREADS, 0)
                .arg_ptr(if first { call.activations } else { call.out })
                .arg_ptr(if first { call.x.as_ptr() } else { call.activations })
                .arg_ptr(group.as_ptr())
                .arg(call.routes.experts)
                .u32(group.n() as u32)
                .u32(k as u32)
                .u32(if first { call.x.stride() } else { call.inner } as u32)
                .u32(call.top_k() as u32)
                .u32(call.experts.first_expert as u32)
                .u32(group.len() as u32)
                .arg_or_null(call.bias(first));
        // SAFETY: `check` compared all shapes; scratch memory was allocated for the sizes of `call`.
        unsafe { launch.overlaps_predecessor().launch(self, s) }
    }
}
