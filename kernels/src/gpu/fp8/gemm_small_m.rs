//! Small-M GEMM (up to 16 rows) with fp8 weights and 16-bit inputs (W8A16): launches of `fp8_gemm_small_m`.
//! Rows of x are prepared before the product: normalised if a norm is fused, then scaled and converted to
//! f16.

use device::gpu::KernelLaunch;
use device::{DType, DeviceError, DeviceStream, MatMut, MatRef};

use super::super::gemm::GemmInputRows;
use super::gemm_small_m_shape::{COMPUTE_WARPS, Fp8SmallMProblem, SLAB, StripsPerPass};
use super::{BLOCK, GEMM_SMALL_M, KERNEL, QUANTIZE, THREADS, weight_scales};
use crate::gate_activation::gated_product_defines;
use crate::gpu::GpuBackend;
use crate::{FusedLinear, LinearFusion, PackedMatrix, PackedScales, PrefetchHint};

/// Maximum number of rows of x that the small-M kernel supports; it reads the weights once for all rows.
const MAX_ROWS: usize = 16;
/// Number of rows of x that one MMA instruction multiplies. With more rows of x, the kernel is compiled with
/// the define `MORE_ROWS`, and uses two MMA instructions.
const EIGHT_ROWS: usize = 8;
/// Maximum number of rows that every block prepares (normalises and scales) itself; more rows are prepared
/// faster by a separate launch.
const IN_KERNEL_PREPARED_ROWS: usize = 4;
/// Maximum number of columns (K) for which every block computes a fused RMS norm itself; with more columns, a
/// separate launch computes the norm.
const NORMED_COLUMNS: usize = 4096;
/// Number of threads per block of the kernel with streamed weights: the consumer warps and four producer
/// warps.
const STREAM_THREADS: u32 = 32 * (COMPUTE_WARPS as u32 + 4);
/// Maximum number of strips (groups of 8 or 16 rows of `W`) per block of the kernel without streamed weights.
const MAX_STRIPS: usize = 8;
/// Number of bytes of each weight row of the next GEMM that a launch prefetches into L2.
/// `IDLE_PREFETCH_BYTES` applies if all weights of the launch fit into shared memory: once they are loaded,
/// memory is idle until the inputs are available. Prefetching more bytes takes longer than it saves.
const PREFETCH_BYTES: usize = 1024;
const IDLE_PREFETCH_BYTES: usize = 2048;
/// Maximum bytes of x that every block prepares (normalises and scales) itself; a separate launch prepares a
/// larger x.
const IN_KERNEL_PREPARED_BYTES: usize = 96 << 10;

/// Input rows of the small-M kernel: address, scale factors of the rows if they are prepared (otherwise
/// null), number of rows, and row stride in elements.
#[derive(Clone, Copy)]
struct Fp8SmallMRows {
    x: *const u8,
    factors: *const u8,
    rows: usize,
    stride: usize,
}

impl Fp8SmallMRows {
    /// Returns the rows of `x` as inputs that the kernel itself must normalise, scale and convert to f16.
    fn unprepared(x: MatRef<'_>) -> Self {
        Self { x: x.as_ptr(), factors: std::ptr::null(), rows: x.rows(), stride: x.stride() }
    }
}

impl GpuBackend {
    /// Whether the small-M kernel supports `rows` input rows of type `dtype` and weights `w` with every op of
    /// `LinearFusion`. Gate and up rows must not share a scale block.
    pub(in super::super) fn fuses_fp8(&self, rows: usize, dtype: DType, w: &PackedMatrix) -> bool {
        let no_shared_block = |unit: usize| unit == 1 || (w.n() / 2).is_multiple_of(unit);
        w.scales().is_some_and(|scales| no_shared_block(scales.rows))
            && self.fits_fp8_small_m(rows, dtype, w)
    }

    /// Whether a linear layer with `rows` input rows uses the small-M kernel.
    pub(in super::super) fn fits_fp8_small_m(
        &self,
        rows: usize,
        dtype: DType,
        w: &PackedMatrix,
    ) -> bool {
        let is_small_m =
            (1..=MAX_ROWS).contains(&rows) && dtype == self.half_dtype() && w.scales().is_some();
        is_small_m
            && (self.streams_weights(w.k()) || self.fp8_strips(rows, w.n(), w.k(), 1).is_some())
    }

    /// Computes [`FusedLinear`](crate::FusedLinear). `fits_fp8_small_m` must be true, and the caller has
    /// checked the shapes.
    pub(in super::super) fn fp8_gemm_small_m(
        &self,
        s: &DeviceStream,
        op: FusedLinear<'_>,
    ) -> Result<(), DeviceError> {
        let FusedLinear { y, x, weight: w, fusion } = op;
        if !self.streams_weights(w.k()) {
            return self.small_m_from_memory(s, FusedLinear { y, x, weight: w, fusion });
        }
        if self.prepares_in_kernel(x.rows(), w.k(), fusion) {
            return self.small_m_streamed(s, y, Fp8SmallMRows::unprepared(x), w, fusion);
        }
        let padded_bytes = |bytes: usize| bytes.next_multiple_of(256);
        let (values, count) = (x.rows() * x.cols(), x.rows());
        let scratch = self.scratch(s, 2 * padded_bytes(values * 2) + padded_bytes(count * 4))?;
        // SAFETY: the addresses are inside the scratch memory allocated above.
        let (out, factors) = unsafe {
            (scratch.add(padded_bytes(values * 2)), scratch.add(2 * padded_bytes(values * 2)))
        };
        let mut from = GemmInputRows::from(x);
        if let Some((norm, eps)) = fusion.norm {
            self.norm_to(s, scratch, x.cols(), x, norm, eps)?;
            from = GemmInputRows { address: scratch, stride: x.cols(), ..from };
        }
        self.scale_rows_to_f16(s, out, factors, from, x.cols())?;
        let rows = Fp8SmallMRows { x: out, factors, rows: count, stride: x.cols() };
        self.small_m_streamed(s, y, rows, w, &LinearFusion { norm: None, ..*fusion })
    }

    /// Whether every block prepares (normalises and scales) the `rows` rows of x, of `k` columns, itself.
    fn prepares_in_kernel(&self, rows: usize, k: usize, fusion: &LinearFusion<'_>) -> bool {
        let normed = fusion.norm.is_none() || k <= NORMED_COLUMNS;
        rows <= IN_KERNEL_PREPARED_ROWS && normed && rows * k * 2 <= self.in_kernel_prepared_bytes()
    }

    /// Returns the maximum size of x, in bytes, that every block prepares itself; it is limited by shared
    /// memory.
    fn in_kernel_prepared_bytes(&self) -> usize {
        IN_KERNEL_PREPARED_BYTES.min(self.shared_bytes() as usize / 3)
    }

    /// Scales each row of `x`, which has `cols` columns, converts it to f16, and writes the rows contiguously
    /// to `to`. Writes the inverse scale of each row to `factors`.
    fn scale_rows_to_f16(
        &self,
        s: &DeviceStream,
        to: *mut u8,
        factors: *mut u8,
        x: GemmInputRows,
        cols: usize,
    ) -> Result<(), DeviceError> {
        let kernel = self.kernel(&QUANTIZE, "scale_rows_to_f16", &[("CHANNELS", 0)])?;
        let launch = KernelLaunch::new(kernel, [x.rows as u32, 1, 1], THREADS, 0)
            .arg_ptr(to)
            .arg_ptr(factors)
            .arg_ptr(x.address)
            .u32(cols as u32)
            .u32(x.stride as u32);
        // SAFETY: the caller guarantees the addresses for these sizes.
        unsafe { launch.overlaps_predecessor().launch(self, s) }
    }

    fn small_m_streamed(
        &self,
        s: &DeviceStream,
        y: MatMut<'_>,
        rows: Fp8SmallMRows,
        w: &PackedMatrix,
        fusion: &LinearFusion<'_>,
    ) -> Result<(), DeviceError> {
        let scales = weight_scales(w)?;
        let (gated, channels) = (fusion.gate.is_some(), scales.rows == 1);
        let problem = Fp8SmallMProblem { rows: rows.rows, n: w.n(), k: w.k(), gated, channels };
        let limits = self.launch_limits();
        let prepared = !rows.factors.is_null();
        let shape = problem.choose_launch(prepared, limits).ok_or(DeviceError::Shape {
            kernel: KERNEL,
            what: "bytes of shared memory",
            got: limits.shared_bytes,
            expected: problem.bytes(StripsPerPass { strips: 1, strips_per_block: 1 }, prepared, 1),
        })?;
        let [is_gated, gate, alpha, limit] = gated_product_defines(fusion.gate);
        let defines = [
            ("OUT_F32", self.act_f32(KERNEL, y.dtype())?),
            ("NORM", u32::from(fusion.norm.is_some())),
            is_gated,
            gate,
            alpha,
            limit,
            ("RESIDUAL", u32::from(fusion.add)),
            ("CHANNELS", u32::from(channels)),
            ("STREAM", 1),
            ("TILES", shape.strips as u32),
            ("SLAB", SLAB as u32),
            ("X_SLABS", u32::from(shape.streams_x)),
            ("PREPARED", u32::from(prepared)),
            ("MORE_ROWS", u32::from(rows.rows > EIGHT_ROWS)),
        ];
        let kernel = self.kernel(&GEMM_SMALL_M, "fp8_gemm_small_m", &defines)?;
        let grid = [shape.blocks as u32, 1, 1];
        let launch = KernelLaunch::new(kernel, grid, STREAM_THREADS, shape.shared_bytes as u32);
        let launch = append_args(launch, y, rows, w, scales, fusion);
        // SAFETY: the caller checked all shapes; rows are aligned to 16 bytes.
        unsafe {
            self.prefetch_args(launch, rows.rows, shape.all_slabs_resident, fusion).launch(self, s)
        }
    }

    /// Appends the arguments of the weight prefetch for the next GEMM; nothing is prefetched unless the next
    /// GEMM also uses this kernel with streamed weights. `all_slabs_resident`: all weights that a block reads
    /// fit into shared memory at once.
    fn prefetch_args(
        &self,
        launch: KernelLaunch,
        rows: usize,
        all_slabs_resident: bool,
        fusion: &LinearFusion<'_>,
    ) -> KernelLaunch {
        let next = fusion.prefetch.filter(|next| self.streams_weights(next.weight.k()));
        let shape = next.and_then(|PrefetchHint { weight, gated }| {
            let channels = weight.scales()?.rows == 1;
            let problem = Fp8SmallMProblem { rows, n: weight.n(), k: weight.k(), gated, channels };
            problem.choose_launch(rows > IN_KERNEL_PREPARED_ROWS, self.launch_limits())
        });
        let Some((PrefetchHint { weight, gated }, shape)) = next.zip(shape) else {
            return [0; 6].into_iter().fold(launch.arg_ptr(std::ptr::null()), KernelLaunch::u32);
        };
        let halves = if gated { 2 } else { 1 };
        let bytes =
            if all_slabs_resident { IDLE_PREFETCH_BYTES } else { PREFETCH_BYTES }.min(weight.k());
        let counts = [weight.n() / halves, halves, weight.k(), shape.strips, shape.blocks, bytes];
        let launch = launch.arg_ptr(weight.as_ptr());
        counts.into_iter().fold(launch, |launch, count| launch.u32(count as u32))
    }

    fn small_m_from_memory(
        &self,
        s: &DeviceStream,
        op: FusedLinear<'_>,
    ) -> Result<(), DeviceError> {
        let FusedLinear { y, x, weight: w, fusion } = op;
        let scales = weight_scales(w)?;
        let Some((strips, shared_bytes)) = self.fp8_strips(x.rows(), w.n(), w.k(), 1) else {
            let (what, got) = ("rows of x", x.rows());
            return Err(DeviceError::Shape { kernel: KERNEL, what, got, expected: MAX_ROWS });
        };
        let [is_gated, gate, alpha, limit] = gated_product_defines(fusion.gate);
        let defines = [
            ("OUT_F32", self.act_f32(KERNEL, y.dtype())?),
            ("NORM", u32::from(fusion.norm.is_some())),
            is_gated,
            gate,
            alpha,
            limit,
            ("RESIDUAL", u32::from(fusion.add)),
            ("CHANNELS", u32::from(scales.rows == 1)),
            ("TILES", strips as u32),
        ];
        let kernel = self.kernel(&GEMM_SMALL_M, "fp8_gemm_small_m", &defines)?;
        let strip_rows = self.strip_rows();
        let (outputs, width) =
            if fusion.gate.is_some() { (w.n() / 2, strip_rows / 2) } else { (w.n(), strip_rows) };
        let blocks = outputs.div_ceil(strips * width);
        let launch = KernelLaunch::new(kernel, [blocks as u32, 1, 1], THREADS, shared_bytes as u32);
        let rows = Fp8SmallMRows::unprepared(x);
        // SAFETY: the caller checked all shapes; rows are aligned to 16 bytes.
        unsafe { append_args(launch, y, rows, w, scales, fusion).launch(self, s) }
    }

    /// Returns the number of rows of `W` per strip. A strip is the smallest range of rows that a block
    /// processes.
    pub(super) fn strip_rows(&self) -> usize {
        if self.warp_size() == 64 { 16 } else { 8 }
    }

    /// Returns the number of strips (8 or 16 rows of `W` each) per block, and the shared memory per block in
    /// bytes, for the kernel without streamed weights. `matrices`: number of weight matrices that one launch
    /// reads. Returns `None` if the rows of x do not fit into shared memory.
    pub(in super::super) fn fp8_strips(
        &self,
        rows: usize,
        n: usize,
        k: usize,
        matrices: usize,
    ) -> Option<(usize, usize)> {
        let (strip_rows, warps) = (self.strip_rows(), (THREADS / self.warp_size()) as usize);
        let limits = self.launch_limits();
        let x_bytes = rows * (k.next_multiple_of(BLOCK) + limits.x_row_padding()) * 2;
        let bytes = |strips: usize| x_bytes + warps * strips * strip_rows * rows * 4;
        let all = matrices * n.div_ceil(strip_rows);
        let target_strips = all.div_ceil(limits.gemm_small_m_blocks(bytes(1)));
        let max_strips = target_strips.next_power_of_two().min(MAX_STRIPS);
        let strips = [8, 4, 2, 1].into_iter().filter(|strips| *strips <= max_strips);
        let fits = |strips: usize| bytes(strips) <= self.shared_bytes() as usize;
        strips.map(|strips| (strips, bytes(strips))).find(|(strips, _)| fits(*strips))
    }
}

/// Appends the arguments that the kernels with and without streamed weights share.
fn append_args(
    launch: KernelLaunch,
    mut y: MatMut<'_>,
    rows: Fp8SmallMRows,
    w: &PackedMatrix,
    scales: &PackedScales,
    fusion: &LinearFusion<'_>,
) -> KernelLaunch {
    let y_stride = y.stride() as u32;
    launch
        .overlaps_predecessor()
        .out(&mut y)
        .arg_ptr(rows.x)
        .arg_ptr(rows.factors)
        .arg_ptr(w.as_ptr())
        .arg_ptr(scales.buffer.as_ptr())
        .arg_or_null(fusion.bias)
        .arg_or_null(fusion.norm.map(|(norm, _)| norm))
        .u32(rows.rows as u32)
        .u32(w.n() as u32)
        .u32(w.k() as u32)
        .u32(y_stride)
        .u32(rows.stride as u32)
        .u32(scales.rows as u32)
        .u32(scales.stride as u32)
        .f32(fusion.norm.map_or(0.0, |(_, eps)| eps))
}
