//! Small-M GEMM (up to 16 rows) with weights streamed by bulk copies: choice of launch shapes, and launches
//! of `gemm_small_m` with the define `STREAM`.

use device::gpu::KernelLaunch;
use device::{DeviceError, DeviceStream, MatMut};

use super::gemm::{GEMM_SMALL_M, GemmInputRows, gemm_sizes};
use super::launch_limits::LaunchLimits;
use crate::gate_activation::gated_product_defines;
use crate::gpu::GpuBackend;
use crate::{FusedLinear, LinearFusion, PackedMatrix};

/// Number of consumer warps; must match `COMPUTE_WARPS` in gemm_small_m/share.h.
const COMPUTE_WARPS: usize = 8;
/// Number of threads per block: the consumer warps and one producer warp.
const THREADS: u32 = 32 * (COMPUTE_WARPS as u32 + 1);
/// Number of rows of `W` per strip. A strip is the smallest range of rows that a block processes.
const STRIP_ROWS: usize = 8;
/// Maximum number of strips that a block processes per pass over the columns (K).
const MAX_STRIPS: usize = 8;
/// Shared memory of barriers and sums of squares, in bytes.
const FIXED_BYTES: usize = 32 * 8 + COMPUTE_WARPS * 16 * 4;
/// Maximum bytes of `x` for which every block keeps all of `x` in shared memory and normalises it itself. A
/// larger `x` is normalised by a separate launch, and is loaded in slabs of columns together with the weights
/// if each block reads it only once.
const RESIDENT_X_BYTES: usize = 40 << 10;
/// Shared memory in bytes from which on a block requests at least half of the SM's shared memory. Otherwise
/// an SM could get two blocks of a launch while another SM is idle. A block of the next launch, or of
/// attention, still fits.
const LARGE_BYTES: usize = 64 << 10;
/// Maximum number of columns (K) for which blocks normalise `x` themselves.
const NORMED_COLUMNS: usize = 4096;

/// Launch shape of `gemm_small_m` with the define `STREAM`: strips (8 rows of `W` each) per pass over K,
/// columns per slab (ring-buffer stage), whether `x` is loaded slab by slab, number of blocks and shared
/// memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct SmallMLaunch {
    strips: usize,
    slab: usize,
    streams_x: bool,
    blocks: usize,
    shared_bytes: usize,
}

/// Sizes of a small-M GEMM. `strips`: number of strips (8 rows each) of `W`; with a gate activation the gate and up
/// rows of an output are in one strip.
#[derive(Debug, Clone, Copy)]
struct SmallMProblem {
    rows: usize,
    strips: usize,
    k: usize,
    normed: bool,
}

impl GpuBackend {
    /// Whether weights with `k` columns are streamed by bulk copies, which the GPU must support.
    pub(super) fn streams_weights(&self, k: usize) -> bool {
        let capability = self.arch().strip_prefix("sm_").map(|a| a.trim_end_matches('a'));
        let hopper = capability.and_then(|c| c.parse::<u32>().ok()).is_some_and(|c| c >= 90);
        let engine = hopper || (self.arch() == "emulated" && self.warp_size() == 32);
        engine && k.is_multiple_of(32)
    }

    /// Computes [`FusedLinear`](crate::FusedLinear) for up to 16 rows; `streams_weights` must be true.
    pub(super) fn stream_small_m(
        &self,
        s: &DeviceStream,
        op: FusedLinear<'_>,
    ) -> Result<(), DeviceError> {
        let FusedLinear { y, x, weight: w, fusion } = op;
        let normalises_separately =
            x.rows() * x_row_stride_bytes(w.k()) > RESIDENT_X_BYTES || w.k() > NORMED_COLUMNS;
        let Some((norm, eps)) = fusion.norm.filter(|_| normalises_separately) else {
            return self.launch_small_m(s, y, x.into(), w, fusion);
        };
        let normed_rows = self.scratch(s, x.rows() * x.cols() * x.dtype().bytes())?;
        self.norm_to(s, normed_rows, x.cols(), x, norm, eps)?;
        let normed_rows = GemmInputRows { address: normed_rows, rows: x.rows(), stride: x.cols() };
        let fusion = LinearFusion { norm: None, ..*fusion };
        self.launch_small_m(s, y, normed_rows, w, &fusion)
    }

    /// Launches the kernel, in which every block normalises the rows of `x` itself if `fusion` has a norm.
    fn launch_small_m(
        &self,
        s: &DeviceStream,
        mut y: MatMut<'_>,
        x: GemmInputRows,
        w: &PackedMatrix,
        fusion: &LinearFusion<'_>,
    ) -> Result<(), DeviceError> {
        let (outputs, width) =
            if fusion.gate.is_some() { (w.n() / 2, STRIP_ROWS / 2) } else { (w.n(), STRIP_ROWS) };
        let normed = fusion.norm.is_some();
        let problem =
            SmallMProblem { rows: x.rows, strips: outputs.div_ceil(width), k: w.k(), normed };
        let limits = self.launch_limits();
        let shape = problem.choose_launch(limits).ok_or(DeviceError::Shape {
            kernel: "linear",
            what: "bytes of shared memory",
            got: limits.shared_bytes,
            expected: problem.bytes(1, problem.slab(), !normed, 1),
        })?;
        let [gated, gate, alpha, limit] = gated_product_defines(fusion.gate);
        let defines = [
            ("OUT_F32", self.act_f32("linear", y.dtype())?),
            ("NORM", u32::from(normed)),
            gated,
            gate,
            alpha,
            limit,
            ("RESIDUAL", u32::from(fusion.add)),
            ("STREAM", 1),
            ("TILES", shape.strips as u32),
            ("SLAB", shape.slab as u32),
            ("X_SLABS", u32::from(shape.streams_x)),
        ];
        let kernel = self.kernel(&GEMM_SMALL_M, "gemm_small_m", &defines)?;
        let (y_stride, eps) = (y.stride() as u32, fusion.norm.map_or(0.0, |(_, eps)| eps));
        let grid = [shape.blocks as u32, 1, 1];
        let launch = KernelLaunch::new(kernel, grid, THREADS, shape.shared_bytes as u32)
            .out(&mut y)
            .arg_ptr(x.address)
            .arg_ptr(w.as_ptr())
            .arg_or_null(fusion.bias)
            .arg_or_null(fusion.norm.map(|(norm, _)| norm));
        let launch = gemm_sizes(launch, x, w, y_stride).f32(eps);
        // SAFETY: the caller checked all shapes; rows are aligned to 16 bytes.
        unsafe { launch.overlaps_predecessor().launch(self, s) }
    }
}

/// Returns the row stride of `x` in shared memory in bytes, for launches in which all of `x` stays in shared
/// memory; must match `x_line` in gemm_small_m/share.h.
fn x_row_stride_bytes(k: usize) -> usize {
    (k * 2).next_multiple_of(128) + 64
}

impl SmallMProblem {
    /// Returns the number of columns (K) of `W` that one ring-buffer stage contains (a slab). It depends on
    /// `k` only, because it determines the summation order.
    fn slab(&self) -> usize {
        self.k.next_power_of_two().clamp(256, 1024)
    }

    /// Returns the shared memory of a block in bytes if its ring buffer has `stages` stages. A stage has
    /// `slab` columns (K) of `strips` strips of `W`, and with `x_slabs` the same columns of `x`.
    fn bytes(&self, strips: usize, slab: usize, x_slabs: bool, stages: usize) -> usize {
        let sums = COMPUTE_WARPS * strips * STRIP_ROWS * self.rows * 4;
        let norm = if self.normed { (self.k * 2).next_multiple_of(128) } else { 0 };
        let resident_x_bytes = if x_slabs { 0 } else { self.rows * x_row_stride_bytes(self.k) };
        let stage_rows = strips * STRIP_ROWS + if x_slabs { self.rows } else { 0 };
        FIXED_BYTES + sums + norm + resident_x_bytes + stages * stage_rows * (slab * 2 + 64)
    }

    /// Chooses the largest number of strips (8 rows of `W` each) per pass over K for which enough ring-buffer
    /// stages fit into shared memory.
    fn choose_launch(&self, limits: LaunchLimits) -> Option<SmallMLaunch> {
        let strips_per_block = self.strips.div_ceil(self.strips.min(limits.multiprocessors));
        let max_strips = strips_per_block.min(MAX_STRIPS);
        let large = !self.normed && self.rows * x_row_stride_bytes(self.k) > RESIDENT_X_BYTES;
        let reads_x_once = |strips| large && strips >= strips_per_block;
        let resident = (1..=max_strips).rev().find_map(|n| {
            let min_stages = if reads_x_once(n) { 2 } else { 3 };
            self.launch_with_stages(n, reads_x_once(n), min_stages, limits)
        });
        let slabs = || {
            (1..=max_strips).rev().find_map(|n| self.launch_with_stages(n, !self.normed, 2, limits))
        };
        resident.or_else(slabs).or_else(|| self.launch_with_stages(1, !self.normed, 1, limits))
    }

    /// Returns the launch shape for a ring buffer of at least `min_stages` stages, or of as many stages as a
    /// block reads slabs if that is less; `None` if the ring buffer does not fit into shared memory.
    fn launch_with_stages(
        &self,
        strips: usize,
        x_slabs: bool,
        min_stages: usize,
        limits: LaunchLimits,
    ) -> Option<SmallMLaunch> {
        let (blocks, slab) = (self.strips.min(limits.multiprocessors), self.slab());
        let items = self.strips.div_ceil(blocks).div_ceil(strips) * self.k.div_ceil(slab);
        let fits =
            |stages: &usize| self.bytes(strips, slab, x_slabs, *stages) <= limits.shared_bytes;
        let stages = (1..=items.min(16)).rev().find(fits)?;
        let bytes = self.bytes(strips, slab, x_slabs, stages);
        let shared_bytes =
            if bytes < LARGE_BYTES { bytes } else { bytes.max(limits.shared_bytes / 2) };
        (stages >= items.min(min_stages)).then_some(SmallMLaunch {
            strips,
            slab,
            streams_x: x_slabs,
            blocks,
            shared_bytes,
        })
    }
}
