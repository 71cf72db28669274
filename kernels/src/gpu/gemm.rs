//! Linear layers on built-in GPU kernels: the small-M GEMM with fused prologue and epilogue, and GEMMs for
//! any number of rows (M) if no vendor BLAS is used.

use device::gpu::{KernelLaunch, KernelSource};
use device::{DType, DeviceError, DeviceStream, MatMut, MatRef, check_dtype, check_size};

use crate::gate_activation::gated_product_defines;
use crate::gpu::GpuBackend;
use crate::{FusedLinear, GpuKernel, Linear, LinearFusion, PackedMatrix};

pub(super) static GEMM_SMALL_M: KernelSource = kernel_source!("gemm_small_m/gemm_small_m.hip");
static GEMM: KernelSource = kernel_source!("gemm/gemm.hip");
static PLAIN: KernelSource = kernel_source!("linear_plain/linear_plain.hip");

const KERNEL: &str = "linear";
/// Number of threads per block of all kernels in this file.
const THREADS: u32 = 256;
/// Maximum number of rows of `x` for the small-M GEMM. With at most this many rows the GEMM is bound by
/// reading the weights; the small-M GEMM reads them only once.
const SMALL_M_ROWS: usize = 16;
/// Number of columns (K) that one warp of the small-M GEMM processes per iteration.
const SMALL_M_CHUNK: usize = 128;
/// Supported numbers of strips (8 or 16 rows of `W` each) per block, in ascending order.
const SMALL_M_STRIPS: [usize; 4] = [1, 2, 4, 8];

/// Maximum number of rows of `W` for which the unoptimised GEMM `linear_plain` assigns one block to each row
/// of `W` (kernel `linear_row`).
const ROW_OUTPUTS: usize = 512;

/// A weight matrix `[n, k]` on the device, or a range of its rows.
#[derive(Debug, Clone, Copy)]
pub(super) struct GemmWeightRows {
    pub(super) address: *const u8,
    pub(super) n: usize,
    pub(super) k: usize,
}

impl From<&PackedMatrix> for GemmWeightRows {
    fn from(w: &PackedMatrix) -> Self {
        Self { address: w.as_ptr(), n: w.n(), k: w.k() }
    }
}

/// Input rows of a GEMM: address of the first row, number of rows, and row stride in elements.
#[derive(Debug, Clone, Copy)]
pub(super) struct GemmInputRows {
    pub(super) address: *const u8,
    pub(super) rows: usize,
    pub(super) stride: usize,
}

impl From<MatRef<'_>> for GemmInputRows {
    fn from(x: MatRef<'_>) -> Self {
        Self { address: x.as_ptr(), rows: x.rows(), stride: x.stride() }
    }
}

/// Launch shape of `gemm_small_m` without bulk copies: strips (8 or 16 rows of `W` each) per block, number of
/// blocks, shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SmallMStripLaunch {
    pub(super) strips: usize,
    pub(super) blocks: usize,
    pub(super) shared_bytes: usize,
}

impl GpuBackend {
    /// Computes a fused linear layer with more rows than `gemm_small_m` supports, by the medium-M or large-M
    /// GEMM.
    fn fused_rows(&self, s: &DeviceStream, op: FusedLinear<'_>) -> Result<(), DeviceError> {
        let FusedLinear { y, x, weight: w, fusion } = op;
        if self.fits_medium_m(x.rows(), x.dtype(), w) {
            check_16_byte_rows(x)?;
            return self.gemm_medium_m(s, FusedLinear { y, x, weight: w, fusion });
        }
        let is_unfused = fusion.norm.is_none() && fusion.bias.is_none() && !fusion.add;
        if !is_unfused || !self.fits_large_m(x.rows(), x.dtype(), w) || !self.is_tma_aligned(&y, x)
        {
            return Err(too_many_rows(x.rows()));
        }
        self.gemm_large_m(s, y, x, w.into(), fusion.gate)
    }

    /// Computes `y = x Wᵀ + bias` with built-in kernels; the caller has checked the shapes.
    pub(super) fn linear_without_blas(
        &self,
        s: &DeviceStream,
        op: Linear<'_>,
    ) -> Result<(), DeviceError> {
        let Linear { mut y, x, weight: w, bias } = op;
        if !uses_tensor_cores(self.half_dtype(), x.dtype(), w) || !has_16_byte_rows(x) {
            return self.gemm_plain(s, Linear { y, x, weight: w, bias });
        }
        if self.fits_small_m(x.rows(), x.dtype(), w) {
            return self.gemm_small_m(
                s,
                FusedLinear {
                    y,
                    x,
                    weight: w,
                    fusion: &LinearFusion { bias, ..LinearFusion::default() },
                },
            );
        }
        if bias.is_none() && self.fits_large_m(x.rows(), x.dtype(), w) && self.is_tma_aligned(&y, x)
        {
            return self.gemm_large_m(s, y, x, w.into(), None);
        }
        if self.fits_medium_m(x.rows(), x.dtype(), w) && Self::is_layout_supported(x, &mut y) {
            return self.gemm_medium_m(
                s,
                FusedLinear {
                    y,
                    x,
                    weight: w,
                    fusion: &LinearFusion { bias, ..LinearFusion::default() },
                },
            );
        }
        self.gemm_tiled(s, y, x, w.into(), bias)
    }

    /// Whether a linear layer with `rows` rows of type `dtype` uses the small-M GEMM, which supports every op
    /// of `LinearFusion`.
    pub(crate) fn fits_small_m(&self, rows: usize, dtype: DType, w: &PackedMatrix) -> bool {
        if w.dtype() == DType::F8E4M3 {
            return self.fuses_fp8(rows, dtype, w);
        }
        let is_small_m =
            (1..=SMALL_M_ROWS).contains(&rows) && uses_tensor_cores(self.half_dtype(), dtype, w);
        is_small_m
            && (self.streams_weights(w.k())
                || self.small_m_strips(rows, w.n(), w.k(), 1, true).is_some())
    }

    /// Returns the launch shape of `gemm_small_m` for `rows` rows of `x` and weights `[n, k]`, if one launch
    /// reads `matrices` such weight matrices; `None` if the rows of `x` do not fit into shared memory.
    pub(super) fn small_m_strips(
        &self,
        rows: usize,
        n: usize,
        k: usize,
        matrices: usize,
        gated: bool,
    ) -> Option<SmallMStripLaunch> {
        let strip_rows = if self.warp_size() == 64 { 16 } else { 8 }; // Rows of W per strip.
        let warps = (THREADS / self.warp_size()) as usize;
        let limits = self.launch_limits();
        let x_bytes = rows * (k.next_multiple_of(SMALL_M_CHUNK) + limits.x_row_padding()) * 2;
        let bytes = |strips: usize| x_bytes + warps * strips * strip_rows * rows * 4;
        let fits = |&strips: &usize| bytes(strips) <= self.shared_bytes() as usize;
        let target_blocks = limits.gemm_small_m_blocks(bytes(1));
        let target_strips = (matrices * n.div_ceil(strip_rows)).div_ceil(target_blocks);
        let max_strips =
            SMALL_M_STRIPS.into_iter().find(|&n| n >= target_strips).unwrap_or(SMALL_M_STRIPS[3]);
        let strips = SMALL_M_STRIPS.into_iter().rev().filter(|&n| n <= max_strips).find(fits)?;
        let (outputs, width) = if gated { (n / 2, strip_rows / 2) } else { (n, strip_rows) };
        let blocks = outputs.div_ceil(strips * width);
        Some(SmallMStripLaunch { strips, blocks, shared_bytes: bytes(strips) })
    }

    fn gemm_small_m(&self, s: &DeviceStream, op: FusedLinear<'_>) -> Result<(), DeviceError> {
        let FusedLinear { mut y, x, weight: w, fusion } = op;
        if self.streams_weights(w.k()) {
            return self.stream_small_m(s, FusedLinear { y, x, weight: w, fusion });
        }
        let Some(shape) = self.small_m_strips(x.rows(), w.n(), w.k(), 1, fusion.gate.is_some())
        else {
            return Err(too_many_rows(x.rows()));
        };
        let [gated, gate, alpha, limit] = gated_product_defines(fusion.gate);
        let defines = [
            ("OUT_F32", u32::from(y.dtype() == DType::F32)),
            ("NORM", u32::from(fusion.norm.is_some())),
            gated,
            gate,
            alpha,
            limit,
            ("RESIDUAL", u32::from(fusion.add)),
            ("TILES", shape.strips as u32),
        ];
        let kernel = self.kernel(&GEMM_SMALL_M, "gemm_small_m", &defines)?;
        let (y_stride, eps) = (y.stride() as u32, fusion.norm.map_or(0.0, |(_, eps)| eps));
        let launch = KernelLaunch::new(
            kernel,
            [shape.blocks as u32, 1, 1],
            THREADS,
            shape.shared_bytes as u32,
        )
        .out(&mut y)
        .arg(x)
        .arg_ptr(w.as_ptr())
        .arg_or_null(fusion.bias)
        .arg_or_null(fusion.norm.map(|(norm, _)| norm));
        let launch = gemm_sizes(launch, x, w, y_stride).f32(eps).overlaps_predecessor();
        // SAFETY: `check` compared all shapes; rows are aligned to 16 bytes.
        unsafe { launch.launch(self, s) }
    }

    /// Launches the tiled tensor-core (AMD: matrix-core) GEMM for any number of rows. The result of a row
    /// does not depend on the other rows.
    pub(super) fn gemm_tiled(
        &self,
        s: &DeviceStream,
        mut y: MatMut<'_>,
        x: MatRef<'_>,
        w: GemmWeightRows,
        bias: Option<MatRef<'_>>,
    ) -> Result<(), DeviceError> {
        let tile_rows = if x.rows() <= 64 { 64 } else { 128 };
        let defines = [
            ("OUT_F32", u32::from(y.dtype() == DType::F32)),
            ("GATED", 0),
            ("TILE_M", tile_rows as u32),
        ];
        let kernel = self.kernel(&GEMM, "gemm", &defines)?;
        let tiles = (w.n.div_ceil(TILE_OUTPUTS), x.rows().div_ceil(tile_rows));
        let grid = [tiles.0 as u32, tiles.1 as u32, 1];
        let y_stride = y.stride() as u32;
        let launch = KernelLaunch::new(kernel, grid, THREADS, self.tile_bytes(tile_rows))
            .out(&mut y)
            .arg(x)
            .arg_ptr(w.address)
            .arg_or_null(bias);
        // SAFETY: `check` compared all shapes; rows are aligned to 16 bytes.
        unsafe { gemm_sizes(launch, x, w, y_stride).overlaps_predecessor().launch(self, s) }
    }

    /// Returns the shared memory of the tiled GEMM in bytes, for tiles of `tile_rows` rows of `x`.
    pub(super) fn tile_bytes(&self, tile_rows: usize) -> u32 {
        // Bytes per row of a tile, padding included; must match `STRIDE` in gemm/tile.h.
        let (stages, row_bytes) = if self.warp_size() == 64 { (1, 64) } else { (3, 80) };
        (stages * (tile_rows + TILE_OUTPUTS) * row_bytes) as u32
    }

    /// Launches the unoptimised GEMM `linear_plain`, which supports every type and shape and computes in f32.
    pub(super) fn gemm_plain(&self, s: &DeviceStream, op: Linear<'_>) -> Result<(), DeviceError> {
        let Linear { mut y, x, weight: w, bias } = op;
        let defines = [
            ("X_F32", self.act_f32(KERNEL, x.dtype())?),
            ("W_F32", self.act_f32(KERNEL, w.dtype())?),
            ("OUT_F32", self.act_f32(KERNEL, y.dtype())?),
        ];
        // The kernel is selected by the number of outputs only: the result of a row must not depend on the
        // number of rows.
        let (name, grid) = if w.n() <= ROW_OUTPUTS {
            ("linear_row", [w.n() as u32, x.rows().div_ceil(4) as u32, 1])
        } else {
            ("linear_tile", [w.n().div_ceil(64) as u32, x.rows().div_ceil(64) as u32, 1])
        };
        let kernel = self.kernel(&PLAIN, name, &defines)?;
        let y_stride = y.stride() as u32;
        let launch = KernelLaunch::new(kernel, grid, THREADS, 0)
            .out(&mut y)
            .arg(x)
            .arg_ptr(w.as_ptr())
            .arg_or_null(bias);
        // SAFETY: the caller checked all shapes.
        unsafe { gemm_sizes(launch, x, w, y_stride).overlaps_predecessor().launch(self, s) }
    }
}

impl GpuKernel for FusedLinear<'_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        let Self { y, x, weight: w, fusion } = self;
        check(gpu.half_dtype(), &y, x, w, fusion)?;
        if x.rows() == 0 {
            return Ok(());
        }
        if !gpu.fits_small_m(x.rows(), x.dtype(), w) {
            return gpu.fused_rows(s, FusedLinear { y, x, weight: w, fusion });
        }
        check_16_byte_rows(x)?;
        if w.dtype() == DType::F8E4M3 {
            return gpu.fp8_gemm_small_m(s, FusedLinear { y, x, weight: w, fusion });
        }
        gpu.gemm_small_m(s, FusedLinear { y, x, weight: w, fusion })
    }
}

/// Number of rows of `W` per tile of the tiled GEMM; must match `TILE_N` in gemm/tile.h.
pub(super) const TILE_OUTPUTS: usize = 128;

/// Appends the sizes that are the last arguments of all GEMM kernels: rows, n, k and the row strides of `y`
/// and `x`.
pub(super) fn gemm_sizes(
    launch: KernelLaunch,
    x: impl Into<GemmInputRows>,
    w: impl Into<GemmWeightRows>,
    y_stride: u32,
) -> KernelLaunch {
    let (GemmInputRows { rows, stride, .. }, GemmWeightRows { n, k, .. }) = (x.into(), w.into());
    let launch = launch.u32(rows as u32).u32(n as u32).u32(k as u32);
    launch.u32(y_stride).u32(stride as u32)
}

/// Returns the error for an input with more rows than the small-M GEMM supports.
fn too_many_rows(rows: usize) -> DeviceError {
    let what = "rows of x";
    DeviceError::Shape { kernel: KERNEL, what, got: rows, expected: SMALL_M_ROWS }
}

fn uses_tensor_cores(half: DType, dtype: DType, w: &PackedMatrix) -> bool {
    dtype == half && w.dtype() == half && w.k().is_multiple_of(8)
}

/// Whether every row is aligned to 16 bytes, as vector loads require.
pub(super) fn has_16_byte_rows(x: MatRef<'_>) -> bool {
    x.stride().is_multiple_of(8) && x.as_ptr().addr().is_multiple_of(16)
}

pub(super) fn check_16_byte_rows(x: MatRef<'_>) -> Result<(), DeviceError> {
    check_size(KERNEL, "row stride", x.stride(), x.stride().next_multiple_of(8))?;
    check_size(KERNEL, "alignment of x", x.as_ptr().addr() % 16, 0)
}

fn check(
    half: DType,
    y: &MatMut<'_>,
    x: MatRef<'_>,
    w: &PackedMatrix,
    fusion: &LinearFusion<'_>,
) -> Result<(), DeviceError> {
    check_size(KERNEL, "rows", y.rows(), x.rows())?;
    check_size(KERNEL, "inputs", x.cols(), w.k())?;
    check_size(KERNEL, "outputs", y.cols(), if fusion.gate.is_some() { w.n() / 2 } else { w.n() })?;
    check_dtype(KERNEL, "input", x.dtype(), half)?;
    if y.dtype() != DType::F32 {
        check_dtype(KERNEL, "output", y.dtype(), half)?;
    }
    if let Some(bias) = fusion.bias {
        check_size(KERNEL, "bias", bias.cols(), w.n())?;
        check_dtype(KERNEL, "bias", bias.dtype(), DType::F32)?;
    }
    if let Some((norm, _)) = fusion.norm {
        check_size(KERNEL, "norm", norm.cols(), w.k())?;
        check_dtype(KERNEL, "norm", norm.dtype(), half)?;
    }
    Ok(())
}
