//! Small-M GEMM (up to 16 rows) with weights streamed by bulk copies: shapes and launches of `gemm_small_m`
//! with `STREAM`.

use device::gpu::KernelLaunch;
use device::{DeviceError, DeviceStream, MatMut, MatRef};

use super::gemm::{GEMM_SMALL_M, sizes};
use crate::gpu::GpuBackend;
use crate::{FusedLinear, LinearFusion, PackedMatrix};

/// Consumer warps; must match `COMPUTE_WARPS` in gemm_small_m/share.h.
const COMPUTE_WARPS: usize = 8;
/// Threads per block: the consumer warps and one producer warp.
const THREADS: u32 = 32 * (COMPUTE_WARPS as u32 + 1);
/// Rows of `W` per strip.
const STRIP_ROWS: usize = 8;
/// Maximum strips per pass of a block.
const MAX_STRIPS: usize = 8;
/// Shared memory for barriers and sums of squares, in bytes.
const FIXED_BYTES: usize = 32 * 8 + COMPUTE_WARPS * 16 * 4;
/// Maximum bytes of x that stay resident in shared memory and are normalised redundantly by every block.
/// Larger x is loaded slab by slab if it is read once, and normalised by a separate launch.
const RESIDENT_X_BYTES: usize = 40 << 10;
/// Minimum shared memory in bytes from which a block requests at least half of the SM's shared memory, so
/// that no SM gets two blocks of a launch while another SM is idle; a block of the next launch, or of
/// attention, still fits.
const LARGE_BYTES: usize = 64 << 10;
/// Maximum columns that a block normalises.
const NORMED_COLUMNS: usize = 4096;

/// Launch shape of `gemm_small_m` with `STREAM`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct SmallMLaunch {
    strips: usize,
    slab: usize,
    streams_x: bool,
    blocks: usize,
    shared_bytes: usize,
}

/// Sizes of a GEMM; with a gated GEMM the gate and up rows of an output are in one strip.
#[derive(Debug, Clone, Copy)]
struct SmallMProblem {
    rows: usize,
    strips: usize,
    k: usize,
    normed: bool,
}

impl GpuBackend {
    /// Whether weights with `k` columns are streamed by bulk copies.
    pub(super) fn streams_weights(&self, k: usize) -> bool {
        let capability = self.arch().strip_prefix("sm_").map(|a| a.trim_end_matches('a'));
        let hopper = capability.and_then(|c| c.parse::<u32>().ok()).is_some_and(|c| c >= 90);
        let engine = hopper || (self.arch() == "emulated" && self.warp_size() == 32);
        engine && k.is_multiple_of(32)
    }

    /// Computes [`FusedLinear`](crate::FusedLinear) for up to 16 rows if `streams_weights` is true.
    pub(super) fn stream_small_m(
        &self,
        s: &DeviceStream,
        op: FusedLinear<'_>,
    ) -> Result<(), DeviceError> {
        let FusedLinear { y, x, weight: w, fusion: around } = op;
        let apart = x.rows() * x_line(w.k()) > RESIDENT_X_BYTES || w.k() > NORMED_COLUMNS;
        let Some((norm, eps)) = around.norm.filter(|_| apart) else {
            return self.launch_small_m(s, y, (x, x.as_ptr(), x.stride()), w, around);
        };
        let normed = self.scratch(s, x.rows() * x.cols() * x.dtype().bytes())?;
        self.norm_to(s, (normed, x.cols()), x, norm, eps)?;
        let around = LinearFusion { norm: None, ..*around };
        self.launch_small_m(s, y, (x, normed, x.cols()), w, &around)
    }

    /// Launches the kernel; `from` and `stride` are the address and row stride of the rows to read, with the
    /// shape of `x`.
    fn launch_small_m(
        &self,
        s: &DeviceStream,
        mut y: MatMut<'_>,
        (x, from, stride): (MatRef<'_>, *const u8, usize),
        w: &PackedMatrix,
        around: &LinearFusion<'_>,
    ) -> Result<(), DeviceError> {
        let (outputs, width) =
            if around.silu_mul { (w.n() / 2, STRIP_ROWS / 2) } else { (w.n(), STRIP_ROWS) };
        let normed = around.norm.is_some();
        let product =
            SmallMProblem { rows: x.rows(), strips: outputs.div_ceil(width), k: w.k(), normed };
        let limits = (self.multiprocessors() as usize, self.shared_bytes() as usize);
        let shape = product.choose_launch(limits).ok_or(DeviceError::Shape {
            kernel: "linear",
            what: "bytes of shared memory",
            got: limits.1,
            expected: product.bytes(1, product.slab(), !normed, 1),
        })?;
        let defines = [
            ("OUT_F32", self.act_f32("linear", y.dtype())?),
            ("NORM", u32::from(normed)),
            ("GATED", u32::from(around.silu_mul)),
            ("RESIDUAL", u32::from(around.add)),
            ("STREAM", 1),
            ("TILES", shape.strips as u32),
            ("SLAB", shape.slab as u32),
            ("X_SLABS", u32::from(shape.streams_x)),
        ];
        let kernel = self.kernel(&GEMM_SMALL_M, "gemm_small_m", &defines)?;
        let (y_stride, eps) = (y.stride() as u32, around.norm.map_or(0.0, |(_, eps)| eps));
        let grid = (shape.blocks as u32, 1, 1);
        let launch = KernelLaunch::new(kernel, grid, THREADS, shape.shared_bytes as u32)
            .out(&mut y)
            .arg_ptr(from)
            .arg_ptr(w.as_ptr())
            .arg_or_null(around.bias)
            .arg_or_null(around.norm.map(|(norm, _)| norm));
        let launch = sizes(launch, (x.rows(), stride), w, y_stride).f32(eps);
        // SAFETY: the caller checked all shapes; rows are aligned to 16 bytes.
        unsafe { launch.overlaps_predecessor().launch(self, s) }
    }
}

/// Returns the row stride of resident x in shared memory, in bytes; must match `x_line` in
/// gemm_small_m/share.h.
fn x_line(k: usize) -> usize {
    (k * 2).next_multiple_of(128) + 64
}

impl SmallMProblem {
    /// Returns the columns of a slab; depends on `k` only, because it determines the summation order.
    fn slab(&self) -> usize {
        self.k.next_power_of_two().clamp(256, 1024)
    }

    /// Returns the shared memory in bytes with `stages` slabs of `strips` strips.
    fn bytes(&self, strips: usize, slab: usize, x_slabs: bool, stages: usize) -> usize {
        let sums = COMPUTE_WARPS * strips * STRIP_ROWS * self.rows * 4;
        let norm = if self.normed { (self.k * 2).next_multiple_of(128) } else { 0 };
        let kept = if x_slabs { 0 } else { self.rows * x_line(self.k) };
        let lines = strips * STRIP_ROWS + if x_slabs { self.rows } else { 0 };
        FIXED_BYTES + sums + norm + kept + stages * lines * (slab * 2 + 64)
    }

    /// Chooses the largest number of strips per pass that leaves room for slabs in flight.
    fn choose_launch(&self, limits: (usize, usize)) -> Option<SmallMLaunch> {
        let share = self.strips.div_ceil(self.strips.min(limits.0));
        let most = share.min(MAX_STRIPS);
        let large = !self.normed && self.rows * x_line(self.k) > RESIDENT_X_BYTES;
        let once = |strips| large && strips >= share;
        let kept = (1..=most).rev().find_map(|n| {
            let least = if once(n) { 2 } else { 3 };
            self.launch_with_stages(n, once(n), least, limits)
        });
        let slabs =
            || (1..=most).rev().find_map(|n| self.launch_with_stages(n, !self.normed, 2, limits));
        kept.or_else(slabs).or_else(|| self.launch_with_stages(1, !self.normed, 1, limits))
    }

    /// Returns the launch shape with at least `least` slabs in shared memory (or all slabs, if there are
    /// fewer); `None` if they do not fit.
    fn launch_with_stages(
        &self,
        strips: usize,
        x_slabs: bool,
        least: usize,
        limits: (usize, usize),
    ) -> Option<SmallMLaunch> {
        let (blocks, slab) = (self.strips.min(limits.0), self.slab());
        let items = self.strips.div_ceil(blocks).div_ceil(strips) * self.k.div_ceil(slab);
        let fits = |stages: &usize| self.bytes(strips, slab, x_slabs, *stages) <= limits.1;
        let stages = (1..=items.min(16)).rev().find(fits)?;
        let bytes = self.bytes(strips, slab, x_slabs, stages);
        let shared_bytes = if bytes < LARGE_BYTES { bytes } else { bytes.max(limits.1 / 2) };
        (stages >= items.min(least)).then_some(SmallMLaunch {
            strips,
            slab,
            streams_x: x_slabs,
            blocks,
            shared_bytes,
        })
    }
}
