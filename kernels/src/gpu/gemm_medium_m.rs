//! Medium-M GEMM (up to 128 rows) with TMA and WGMMA on NVIDIA sm_90a: choice of launch shapes, and launches
//! of `gemm_medium_m`.

use device::gpu::{KernelLaunch, KernelSource, TmaMatrix};
use device::{DType, DeviceError, DeviceStream, MatMut, MatRef, check_size};

use super::gemm::{GemmInputRows, gemm_sizes, has_16_byte_rows};
use super::launch_limits::LaunchLimits;
use crate::gate_activation::gated_product_defines;
use crate::gpu::GpuBackend;
use crate::{FusedLinear, LinearFusion, PackedMatrix};

static GEMM_MEDIUM_M: KernelSource = kernel_source!("gemm_medium_m/gemm_medium_m.hip");

const KERNEL: &str = "linear";
/// Number of rows of `x` per consumer warpgroup, the M of a WGMMA instruction.
const WARPGROUP_ROWS: usize = 64;
/// Maximum number of rows of `x`; up to 16 rows use `gemm_small_m` instead.
const MAX_ROWS: usize = 128;
/// Number of columns (K) of `x` and `W` per ring-buffer stage.
const COLUMNS: usize = 64;
/// Supported numbers of rows of `W` per tile: the N of the WGMMA instructions in dev/wgmma.h.
const WIDTHS: [usize; 8] = [16, 32, 48, 64, 80, 96, 128, 192];
/// Maximum number of stages, for which the kernel has barriers, and minimum number of stages: one is consumed
/// while the next is loaded.
const MAX_STAGES: usize = 16;
const MIN_STAGES: usize = 2;
/// Shared memory per block in bytes, without the ring-buffer stages and the split-K sums: barriers, and
/// alignment of the ring buffer.
const FIXED_BYTES: usize = (2 * MAX_STAGES + 2) * 8 + 1024;
/// Minimum number of stages (of `COLUMNS` columns) that every block of a cluster must process for split-K to
/// be used.
const SHARED_STAGES: usize = 4;
/// If a tile has fewer rows of `W` than this, split-K uses four blocks instead of two: with such narrow
/// tiles, loading the rows of `x` would take longer than loading `W`.
const NARROW: usize = 64;
/// One of every `SINGLE_SM_GPC_RATIO` groups of four SMs cannot run a cluster of four blocks: a cluster must
/// run within one GPC, and the number of SMs of a GPC is not a multiple of four.
const SINGLE_SM_GPC_RATIO: usize = 11;

/// Launch shape of `gemm_medium_m`: tile size, split-K factor, number of blocks and shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct MediumMLaunch {
    /// Number of rows of `W` per tile.
    width: usize,
    /// Number of blocks of a cluster, which divide the K of a tile among them (split-K).
    splits: usize,
    /// Number of rows of `x` per stage, a multiple of `WARPGROUP_ROWS`.
    rows: usize,
    blocks: usize,
    shared_bytes: usize,
}

/// Sizes of a medium-M GEMM, `y [rows, n] = x [rows, k] Wᵀ`. `gated`: half of the rows of `W` are gate rows,
/// and `y` has `n / 2` columns.
#[derive(Debug, Clone, Copy)]
struct MediumMProblem {
    rows: usize,
    n: usize,
    k: usize,
    gated: bool,
}

impl GpuBackend {
    /// Whether the medium-M GEMM supports `rows` rows of type `dtype` with weights `w`.
    pub(crate) fn fits_medium_m(&self, rows: usize, dtype: DType, w: &PackedMatrix) -> bool {
        let half = dtype == self.half_dtype() && w.dtype() == self.half_dtype();
        // A GEMM with a gate activation needs the most shared memory; if it fits, every GEMM of these sizes fits.
        let problem = MediumMProblem { rows, n: w.n(), k: w.k(), gated: true };
        half && self.has_wgmma_tma()
            && problem.fits()
            && problem.choose_launch(self.launch_limits()).is_some()
    }

    /// Computes [`FusedLinear`](crate::FusedLinear) if `fits_medium_m` is true.
    pub(super) fn gemm_medium_m(
        &self,
        s: &DeviceStream,
        op: FusedLinear<'_>,
    ) -> Result<(), DeviceError> {
        let FusedLinear { y, x, weight: w, fusion } = op;
        let Some((norm, eps)) = fusion.norm else {
            return self.launch_medium_m(s, y, x.into(), w, fusion);
        };
        let normed_rows = self.scratch(s, x.rows() * x.cols() * x.dtype().bytes())?;
        self.norm_to(s, normed_rows, x.cols(), x, norm, eps)?;
        let normed_rows = GemmInputRows { address: normed_rows, rows: x.rows(), stride: x.cols() };
        self.launch_medium_m(s, y, normed_rows, w, fusion)
    }

    /// Launches the kernel. If `fusion` has a norm, the caller has already normalised the rows of `x`.
    fn launch_medium_m(
        &self,
        s: &DeviceStream,
        mut y: MatMut<'_>,
        x: GemmInputRows,
        w: &PackedMatrix,
        fusion: &LinearFusion<'_>,
    ) -> Result<(), DeviceError> {
        check_size(KERNEL, "parity of the row stride of y", y.stride() % 2, 0)?;
        check_size(KERNEL, "alignment of y", y.as_mut_ptr().addr() % (2 * y.dtype().bytes()), 0)?;
        let problem =
            MediumMProblem { rows: x.rows, n: w.n(), k: w.k(), gated: fusion.gate.is_some() };
        let shape = problem.choose_launch(self.launch_limits()).ok_or(DeviceError::Shape {
            kernel: KERNEL,
            what: "bytes of shared memory",
            got: self.shared_bytes() as usize,
            expected: problem.bytes(WIDTHS[0], 1, MIN_STAGES),
        })?;
        let [gated, gate, alpha, limit] = gated_product_defines(fusion.gate);
        let defines = [
            ("OUT_F32", self.act_f32(KERNEL, y.dtype())?),
            gated,
            gate,
            alpha,
            limit,
            ("RESIDUAL", u32::from(fusion.add)),
            ("ROWS", shape.rows as u32),
            ("TILE", shape.width as u32),
            ("SPLITS", shape.splits as u32),
        ];
        let kernel = self.kernel(&GEMM_MEDIUM_M, "gemm_medium_m", &defines)?;
        let box_rows = if fusion.gate.is_some() { shape.width / 2 } else { shape.width };
        let columns = w.k();
        let x_map = self.encode_tensor_map(&TmaMatrix {
            matrix: x.address,
            rows: x.rows,
            columns,
            stride: x.stride,
            box_rows: x.rows,
        })?;
        let matrix = w.as_ptr();
        let w_map = self.encode_tensor_map(&TmaMatrix {
            matrix,
            rows: w.n(),
            columns,
            stride: columns,
            box_rows,
        })?;
        let threads = (shape.rows / WARPGROUP_ROWS * 128 + 32) as u32;
        let (grid, y_stride) = ([shape.blocks as u32, 1, 1], y.stride() as u32);
        let launch = KernelLaunch::new(kernel, grid, threads, shape.shared_bytes as u32)
            .in_clusters(shape.splits as u32)
            .out(&mut y)
            .arg_ptr(x.address)
            .arg_ptr(w.as_ptr())
            .arg_or_null(fusion.bias);
        let launch = gemm_sizes(launch, x, w, y_stride);
        let launch = launch.arg_words(&x_map.0).arg_words(&w_map.0);
        // SAFETY: the caller checked all shapes; rows are aligned to 16 bytes.
        unsafe { launch.overlaps_predecessor().launch(self, s) }
    }

    /// Whether the kernel supports the alignment and strides of `x` and `y`.
    pub(super) fn is_layout_supported(x: MatRef<'_>, y: &mut MatMut<'_>) -> bool {
        let pairs = y.as_mut_ptr().addr().is_multiple_of(2 * y.dtype().bytes());
        has_16_byte_rows(x) && pairs && y.stride().is_multiple_of(2)
    }
}

impl MediumMProblem {
    fn fits(&self) -> bool {
        (1..=MAX_ROWS).contains(&self.rows)
            && self.n.is_multiple_of(16)
            && self.k.is_multiple_of(COLUMNS)
            && self.k > 0
    }

    fn outputs(&self) -> usize {
        if self.gated { self.n / 2 } else { self.n }
    }

    /// Returns the number of rows of `x` per stage.
    fn stage_x_rows(&self) -> usize {
        self.rows.next_multiple_of(WARPGROUP_ROWS)
    }

    /// Returns the shared memory in bytes for tiles of `width` rows of `W`, `splits` blocks per cluster and
    /// `stages` stages.
    fn bytes(&self, width: usize, splits: usize, stages: usize) -> usize {
        let halves = if self.gated { 2 } else { 1 };
        let eights = (width / halves / 8).div_ceil(splits) * halves;
        let sums = if splits > 1 { splits * eights * self.stage_x_rows() * 32 } else { 0 };
        FIXED_BYTES + sums + stages * (width + self.stage_x_rows()) * COLUMNS * 2
    }

    /// Chooses the launch shape: one tile per cluster of two or four blocks (split-K) if all clusters are
    /// resident at once, otherwise one tile per block. Split-K halves or quarters the loads of `x`, which
    /// cost as much per row as loads of `W`. The split-K factor depends only on `n` and `k`, so that the
    /// summation order of a row does not depend on the number of rows. Returns `None` if there are more tiles
    /// than resident blocks, or too little shared memory.
    fn choose_launch(&self, limits: LaunchLimits) -> Option<MediumMLaunch> {
        let multiprocessors = limits.multiprocessors;
        let halves = if self.gated { 2 } else { 1 };
        let widths = WIDTHS.iter().copied().filter(|w| w.is_multiple_of(8 * halves));
        let tiles = |width: usize| self.outputs().div_ceil(width / halves);
        let clusters = |splits| match splits {
            4 => multiprocessors / 4 - multiprocessors / (4 * SINGLE_SM_GPC_RATIO),
            _ => multiprocessors / splits,
        };
        let find_width = |splits, max_width| {
            let has_enough_stages = splits == 1 || self.k / COLUMNS >= splits * SHARED_STAGES;
            let fits_device = |w: &usize| *w <= max_width && tiles(*w) <= clusters(splits);
            widths.clone().filter(|_| has_enough_stages).find(fits_device).map(|w| (w, splits))
        };
        let (two, four) = (find_width(2, 96), find_width(4, 80));
        let narrow = |&(w, _): &(usize, usize)| w < NARROW;
        let split_k = if two.as_ref().is_none_or(narrow) { four.or(two) } else { two };
        let (width, splits) = split_k.or_else(|| find_width(1, 192))?;
        let max_stages = (self.k / COLUMNS).div_ceil(splits).clamp(MIN_STAGES, MAX_STAGES);
        let fitting = |stages: &usize| self.bytes(width, splits, *stages) <= limits.shared_bytes;
        let stages = (MIN_STAGES..=max_stages).rev().find(fitting)?;
        Some(MediumMLaunch {
            width,
            splits,
            rows: self.stage_x_rows(),
            blocks: tiles(width) * splits,
            shared_bytes: self.bytes(width, splits, stages),
        })
    }
}
