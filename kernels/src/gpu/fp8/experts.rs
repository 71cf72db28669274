//! Expert MLPs with block-scaled fp8 weights: launches of the two grouped GEMMs that do not use TMA.

use device::gpu::{KernelLaunch, KernelSource};
use device::{DType, DeviceDriver, DeviceError, DeviceStream};

use super::super::moe_call::{KERNEL, MoeLaunchArgs, SMALL_M_ROWS};
use super::super::moe_grouped_gemm_tma::TmaWeights;
use super::THREADS;
use super::gemm::RowQuantizationScheme;
use super::pack::{ScaleBlockShape, expert_block_shape};
use crate::gpu::GpuBackend;
use crate::{HostMat, PackedMatrixGroup, PackedScales};

static EXPERTS: KernelSource = kernel_source!("moe_fp8_gemm/moe_fp8_gemm.hip");

/// Number of rows of `W` per tile of the fp8 grouped GEMM; must match `TILE` in fp8_gemm/tile.h.
const TILE_ROWS: usize = 64;

/// Returns the scale block shape of the expert projections `matrices`; `None` if kernels do not support these
/// projections in fp8. A projection is supported if it has block scales or a single scale, and no scale block
/// contains gate rows as well as up rows.
pub(in super::super) fn fp8_experts_block_shape(
    matrices: &[Vec<HostMat<'_>>],
    gated: bool,
) -> Option<ScaleBlockShape> {
    let parts: Vec<HostMat<'_>> = matrices.iter().flatten().copied().collect();
    let outputs =
        matrices.first().map_or(0, |parts| parts.iter().map(HostMat::rows).sum::<usize>());
    let no_shared_block = |unit: usize| unit > 1 && (!gated || (outputs / 2).is_multiple_of(unit));
    expert_block_shape(&parts).filter(|block| no_shared_block(block.rows))
}

impl GpuBackend {
    /// Whether fp8 experts are dequantised to 16 bits when they are loaded: if the TMA kernel supports 16-bit
    /// but not fp8 weights of these shapes, and the dequantised experts of all `layers` layers take at most
    /// half of the device memory. Decoding is then 1.5 to 3.2 times as fast (Qwen3-30B-A3B on an H200, 1 to
    /// 256 requests).
    pub(in super::super) fn dequantizes_experts(
        &self,
        gate_up: &[Vec<HostMat<'_>>],
        down: &[Vec<HostMat<'_>>],
        layers: usize,
    ) -> bool {
        let size = |m: &HostMat<'_>| m.rows() * m.cols();
        let layer_values: usize = gate_up.iter().chain(down).flatten().map(size).sum();
        let bytes = (layer_values * self.half_dtype().bytes()).saturating_mul(layers);
        let supports_tma = |dtype| self.supports_tma_in(dtype, gate_up, down);
        let fits = bytes as u64 <= self.mem_info().total_bytes / 2;
        supports_tma(self.half_dtype()) && !supports_tma(DType::F8E4M3) && fits
    }

    /// Whether the TMA kernel supports experts with these projections, packed in `dtype`.
    pub(crate) fn supports_tma_in(
        &self,
        dtype: DType,
        gate_up: &[Vec<HostMat<'_>>],
        down: &[Vec<HostMat<'_>>],
    ) -> bool {
        [gate_up, down].into_iter().all(|matrices| {
            let part = matrices.first().and_then(|parts| parts.first());
            let weights = TmaWeights::of_dtype(dtype);
            part.is_some_and(|part| {
                self.supports_grouped_gemm_tma(weights, part.rows(), part.cols())
            })
        })
    }

    /// Launches the grouped GEMM for few tokens per expert, with 16-bit inputs (W8A16). `first`: true for the
    /// gate and up projection, false for the down projection.
    pub(in super::super) fn moe_gemm_fp8_small_m(
        &self,
        s: &DeviceStream,
        call: &MoeLaunchArgs<'_>,
        first: bool,
    ) -> Result<(), DeviceError> {
        let (group, k) = call.gemm_weights(first);
        let shape = self.fp8_strips(SMALL_M_ROWS, group.n(), k, call.max_active_experts());
        let Some((strips, shared_bytes)) = shape else {
            let (what, got) = ("input features of the small-M GEMM", k);
            return Err(DeviceError::Shape { kernel: KERNEL, what, got, expected: 0 }); // See `choose_kernel`.
        };
        let [gated, gate, alpha, limit] = call.gate_defines(first);
        let defines = [gated, gate, alpha, limit, ("TILES", strips as u32)];
        let kernel = self.kernel(&EXPERTS, "moe_fp8_gemm_small_m", &defines)?;
        let strip_rows = self.strip_rows();
        let (outputs, width) =
            if first { (group.n() / 2, strip_rows / 2) } else { (group.n(), strip_rows) };
        let blocks = outputs.div_ceil(strips * width);
        let grid = [blocks as u32, call.max_segments() as u32, 1];
        let launch = KernelLaunch::new(kernel, grid, THREADS, shared_bytes as u32);
        let launch = with_scales(call.gemm_args(launch, first), group)?;
        // SAFETY: all shapes were checked; scratch memory was allocated for the sizes of `call`.
        unsafe { launch.overlaps_predecessor().launch(self, s) }
    }

    /// Launches the grouped GEMM for many tokens per expert, with fp8-quantised inputs (W8A8). `first`: true
    /// for the gate and up projection, false for the down projection.
    pub(in super::super) fn moe_grouped_gemm_fp8(
        &self,
        s: &DeviceStream,
        call: &MoeLaunchArgs<'_>,
        first: bool,
    ) -> Result<(), DeviceError> {
        let (x, (group, _)) = (call.inputs(first), call.gemm_weights(first));
        let scaling = group_scales(group)?.activation_scaling;
        let grid = RowQuantizationScheme { channels: false, scaling };
        self.quantize_rows(s, call.quantized, x, x.rows(), grid)?;
        let [gated, gate, alpha, limit] = call.gate_defines(first);
        let defines = [gated, gate, alpha, limit, ("TILES", 0)];
        let kernel = self.kernel(&EXPERTS, "moe_fp8_grouped_gemm", &defines)?;
        let blocks = group.n().div_ceil(TILE_ROWS);
        let grid = [blocks as u32, call.max_segments() as u32, 1];
        let launch = call.gemm_args(KernelLaunch::new(kernel, grid, THREADS, 0), first);
        let launch = with_scales(launch, group)?;
        let launch = launch.arg_ptr(call.quantized[1]).u32(x.rows() as u32);
        // SAFETY: all shapes were checked; scratch memory was allocated for the sizes of `call`.
        unsafe { launch.overlaps_predecessor().launch(self, s) }
    }
}

fn group_scales(group: &PackedMatrixGroup) -> Result<&PackedScales, DeviceError> {
    let (what, dtype) = ("experts without scales", DType::F8E4M3);
    group.scales().ok_or(DeviceError::Unsupported { kernel: KERNEL, what, dtype })
}

fn with_scales(
    launch: KernelLaunch,
    group: &PackedMatrixGroup,
) -> Result<KernelLaunch, DeviceError> {
    let PackedScales { buffer, rows, stride, .. } = group_scales(group)?;
    Ok(launch.arg_ptr(buffer.as_ptr()).u32(*rows as u32).u32(*stride as u32))
}
