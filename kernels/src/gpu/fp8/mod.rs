//! Linear layers and experts whose weights are kept in fp8, and who computes them.
//!
//! | rows | by | inputs |
//! |---|---|---|
//! | ≤ 16 | `fp8_few`, with its neighbours: it reads the weights once | as they are |
//! | more | the matrix library where it knows the scales, else `fp8_tile` | quantised: `after`, else `fp8_rows` |
//! | experts on warpgroups | `moe_little`, `moe_stream` (`moe_grouped_gemm_tma.rs`) | as they are |
//! | experts elsewhere, few rows each | `moe_fp8_few` | as they are |
//! | more | `moe_fp8_tile` | quantised: `fp8_rows` |

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

static GEMM_SMALL_M: KernelSource = kernel_source!("fp8_few/fp8_few.hip");
static QUANTIZE: KernelSource = kernel_source!("fp8_rows/fp8_rows.hip");
static GEMM: KernelSource = kernel_source!("fp8_tile/fp8_tile.hip");

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
