//! Linear layers and experts whose weights are kept in fp8, and who computes them.
//!
//! | rows | by | inputs |
//! |---|---|---|
//! | ≤ 16 | `fp8_gemm_small_m`, with its neighbours: it reads the weights once | as they are |
//! | more | the matrix library where it knows the scales, else `fp8_gemm` | quantised: `after`, else `fp8_quantize_rows` |
//! | experts on warpgroups | `moe_fused_decode`, `moe_grouped_gemm_tma` (`moe_grouped_gemm_tma.rs`) | as they are |
//! | experts elsewhere, few rows each | `moe_fp8_gemm_small_m` | as they are |
//! | more | `moe_fp8_grouped_gemm` | quantised: `fp8_quantize_rows` |

mod experts;
mod gemm;
mod gemm_small_m;
mod gemm_small_m_shape;
mod pack;
mod prologue;

pub(super) use experts::supports_fp8_experts;
pub(super) use gemm::QuantizedRows;
pub(super) use pack::scale_block_shape;

use device::DeviceError;
use device::gpu::KernelSource;

use crate::{PackedMatrix, PackedScales};

static GEMM_SMALL_M: KernelSource = kernel_source!("fp8_gemm_small_m/fp8_gemm_small_m.hip");
static QUANTIZE: KernelSource = kernel_source!("fp8_quantize/fp8_quantize.hip");
static GEMM: KernelSource = kernel_source!("fp8_gemm/fp8_gemm.hip");

const KERNEL: &str = "linear";
/// Threads of a block of all kernels but those that stream.
const THREADS: u32 = 256;
/// Inputs that share a scale in blocks.
pub(super) const BLOCK: usize = 128;

/// The scales of a matrix in fp8.
fn known(w: &PackedMatrix) -> Result<&PackedScales, DeviceError> {
    let (kernel, what, dtype) = (KERNEL, "weight without scales", w.dtype());
    w.scales().ok_or(DeviceError::Unsupported { kernel, what, dtype })
}
