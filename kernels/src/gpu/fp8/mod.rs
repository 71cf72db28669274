//! Linear layers and experts with fp8 weights, and kernel selection. BLASLt is cuBLASLt on NVIDIA and
//! hipBLASLt on AMD.
//!
//! | rows | kernel | inputs |
//! |---|---|---|
//! | ≤ 16 | `fp8_gemm_small_m`: reads the weights once, supports fusion | 16-bit |
//! | > 16 | BLASLt if it supports the scales, else `fp8_gemm` | fp8: prologue, else `fp8_quantize_rows` |
//! | experts with WGMMA | `moe_fused_decode`, `moe_grouped_gemm_tma` (`moe_grouped_gemm_tma.rs`) | 16-bit |
//! | experts without WGMMA, few rows per expert | `moe_fp8_gemm_small_m` | 16-bit |
//! | experts without WGMMA, more rows | `moe_fp8_grouped_gemm` | fp8: `fp8_quantize_rows` |

mod experts;
mod gemm;
mod gemm_small_m;
mod gemm_small_m_shape;
mod pack;
mod prologue;

pub(super) use experts::fp8_experts_block_shape;
pub(super) use gemm::QuantizedRows;

use device::DeviceError;
use device::gpu::KernelSource;

use crate::{PackedMatrix, PackedScales};

static GEMM_SMALL_M: KernelSource = kernel_source!("fp8_gemm_small_m/fp8_gemm_small_m.hip");
static QUANTIZE: KernelSource = kernel_source!("fp8_quantize/fp8_quantize.hip");
static GEMM: KernelSource = kernel_source!("fp8_gemm/fp8_gemm.hip");

const KERNEL: &str = "linear";
/// Number of threads per block of all fp8 kernels, except the small-M kernel with streamed weights.
const THREADS: u32 = 256;
/// Number of input columns that share a block scale.
pub(super) const BLOCK: usize = 128;

/// Returns the dequantisation scales of an fp8 matrix.
///
/// Errors: the matrix has no scales.
fn weight_scales(w: &PackedMatrix) -> Result<&PackedScales, DeviceError> {
    let (kernel, what, dtype) = (KERNEL, "weight without scales", w.dtype());
    w.scales().ok_or(DeviceError::Unsupported { kernel, what, dtype })
}
