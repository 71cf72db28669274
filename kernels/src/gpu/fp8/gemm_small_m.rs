//! Small-M GEMM (up to 16 rows) with fp8 weights and 16-bit inputs (W8A16): launches of `fp8_gemm_small_m`.

use device::gpu::KernelLaunch;
use device::{DType, DeviceError, DeviceStream, MatMut};

use super::gemm_small_m_shape::{COMPUTE_WARPS, Fp8SmallMProblem, SLAB};
use super::{BLOCK, GEMM_SMALL_M, KERNEL, QUANTIZE, THREADS, known};
use crate::gpu::GpuBackend;
use crate::{FusedLinear, LinearFusion, PackedMatrix, PackedScales, PrefetchHint};

/// Maximum rows of x; the weights are read once for all of them.
const MAX_ROWS: usize = 16;
/// Rows of x per MMA instruction.
const EIGHT_ROWS: usize = 8;
/// Maximum rows that every block prepares (normalises and scales) redundantly; more rows are faster in a
/// separate launch.
const IN_KERNEL_PREPARED_ROWS: usize = 4;
/// Maximum columns that a block normalises.
const NORMED_COLUMNS: usize = 4096;
/// Threads per block of the streaming kernel: the consumer warps and four producer warps.
const STREAM_THREADS: u32 = 32 * (COMPUTE_WARPS as u32 + 4);
/// Maximum strips per block of the kernel without streaming.
const MAX_STRIPS: usize = 8;
/// Bytes per row of the next GEMM's weights that a block prefetches into L2, and bytes if memory would be
/// idle otherwise. Prefetching more takes longer than it saves.
const PREFETCH_BYTES: usize = 1024;
const IDLE_PREFETCH_BYTES: usize = 2048;
/// Maximum bytes of x that every block prepares redundantly.
const IN_KERNEL_PREPARED_BYTES: usize = 96 << 10;

/// Input rows: address, per-row factors if the rows are prepared (else null), and row stride in elements.
struct Fp8SmallMRows {
    x: *const u8,
    factors: *const u8,
    stride: usize,
}

impl GpuBackend {
    /// Whether the small-M kernel supports these rows with all of `LinearFusion`: gate and up rows must not
    /// share a scale block.
    pub(in super::super) fn fuses_fp8(&self, rows: usize, dtype: DType, w: &PackedMatrix) -> bool {
        let apart = |unit: usize| unit == 1 || (w.n() / 2).is_multiple_of(unit);
        w.scales().is_some_and(|scales| apart(scales.rows)) && self.fits_fp8_small_m(rows, dtype, w)
    }

    /// Whether `rows` rows use the small-M kernel.
    pub(in super::super) fn fits_fp8_small_m(
        &self,
        rows: usize,
        dtype: DType,
        w: &PackedMatrix,
    ) -> bool {
        let few =
            (1..=MAX_ROWS).contains(&rows) && dtype == self.half_dtype() && w.scales().is_some();
        few && (self.streams_weights(w.k()) || self.fp8_strips(rows, w.n(), w.k(), 1).is_some())
    }

    /// Computes [`FusedLinear`](crate::FusedLinear) for checked shapes if `fits_fp8_small_m` is true.
    pub(in super::super) fn fp8_gemm_small_m(
        &self,
        s: &DeviceStream,
        op: FusedLinear<'_>,
    ) -> Result<(), DeviceError> {
        let FusedLinear { y, x, weight: w, fusion: around } = op;
        if !self.streams_weights(w.k()) {
            return self.small_m_from_memory(s, FusedLinear { y, x, weight: w, fusion: around });
        }
        let normed = around.norm.is_none() || w.k() <= NORMED_COLUMNS;
        let own = x.rows() <= IN_KERNEL_PREPARED_ROWS
            && normed
            && x.rows() * w.k() * 2 <= self.in_kernel_prepared_bytes();
        if own {
            let rows =
                Fp8SmallMRows { x: x.as_ptr(), factors: std::ptr::null(), stride: x.stride() };
            return self.small_m_streamed(s, y, (x.rows(), rows), w, around);
        }
        let line = |bytes: usize| bytes.next_multiple_of(256);
        let (values, count) = (x.rows() * x.cols(), x.rows());
        let scratch = self.scratch(s, 2 * line(values * 2) + line(count * 4))?;
        // SAFETY: the addresses are inside the scratch memory allocated above.
        let (half, factors) =
            unsafe { (scratch.add(line(values * 2)), scratch.add(2 * line(values * 2))) };
        let mut from = (x.as_ptr(), x.stride());
        if let Some((norm, eps)) = around.norm {
            self.norm_to(s, (scratch, x.cols()), x, norm, eps)?;
            from = (scratch, x.cols());
        }
        self.scale_rows_to_f16(s, (half, factors), from, (x.rows(), x.cols()))?;
        let rows = Fp8SmallMRows { x: half, factors, stride: x.cols() };
        self.small_m_streamed(s, y, (count, rows), w, &LinearFusion { norm: None, ..*around })
    }

    /// Returns the maximum bytes of x that every block prepares redundantly, limited by shared memory.
    fn in_kernel_prepared_bytes(&self) -> usize {
        IN_KERNEL_PREPARED_BYTES.min(self.shared_bytes() as usize / 3)
    }

    /// Scales each row and converts it to f16; `factors` gets the inverse scale of each row.
    fn scale_rows_to_f16(
        &self,
        s: &DeviceStream,
        (to, factors): (*mut u8, *mut u8),
        (x, stride): (*const u8, usize),
        (rows, cols): (usize, usize),
    ) -> Result<(), DeviceError> {
        let kernel = self.kernel(&QUANTIZE, "scale_rows_to_f16", &[("CHANNELS", 0)])?;
        let launch = KernelLaunch::new(kernel, (rows as u32, 1, 1), THREADS, 0)
            .arg_ptr(to)
            .arg_ptr(factors)
            .arg_ptr(x)
            .u32(cols as u32)
            .u32(stride as u32);
        // SAFETY: the caller guarantees the addresses for these sizes.
        unsafe { launch.overlaps_predecessor().launch(self, s) }
    }

    fn small_m_streamed(
        &self,
        s: &DeviceStream,
        y: MatMut<'_>,
        (count, rows): (usize, Fp8SmallMRows),
        w: &PackedMatrix,
        around: &LinearFusion<'_>,
    ) -> Result<(), DeviceError> {
        let scales = known(w)?;
        let (gated, channels) = (around.silu_mul, scales.rows == 1);
        let product = Fp8SmallMProblem { rows: count, n: w.n(), k: w.k(), gated, channels };
        let limits = (self.multiprocessors() as usize, self.shared_bytes() as usize);
        let prepared = !rows.factors.is_null();
        let shape = product.choose_launch(prepared, limits).ok_or(DeviceError::Shape {
            kernel: KERNEL,
            what: "bytes of shared memory",
            got: limits.1,
            expected: product.bytes((1, 1), prepared, 1),
        })?;
        let defines = [
            ("OUT_F32", self.act_f32(KERNEL, y.dtype())?),
            ("NORM", u32::from(around.norm.is_some())),
            ("GATED", u32::from(gated)),
            ("RESIDUAL", u32::from(around.add)),
            ("CHANNELS", u32::from(channels)),
            ("STREAM", 1),
            ("TILES", shape.strips as u32),
            ("SLAB", SLAB as u32),
            ("X_SLABS", u32::from(shape.streams_x)),
            ("PREPARED", u32::from(prepared)),
            ("MORE_ROWS", u32::from(count > EIGHT_ROWS)),
        ];
        let kernel = self.kernel(&GEMM_SMALL_M, "fp8_gemm_small_m", &defines)?;
        let grid = (shape.blocks as u32, 1, 1);
        let launch = KernelLaunch::new(kernel, grid, STREAM_THREADS, shape.shared_bytes as u32);
        let launch = arguments(launch, y, (count, rows), w, scales, around);
        // SAFETY: the caller checked all shapes; rows are aligned to 16 bytes.
        unsafe {
            self.prefetch_args(launch, count, shape.all_slabs_resident, around).launch(self, s)
        }
    }

    /// Appends the arguments of the weight prefetch for the next GEMM, if that streams its weights too.
    /// `whole`: all weights of this launch are in flight at once, so memory is idle until its inputs are
    /// available.
    fn prefetch_args(
        &self,
        launch: KernelLaunch,
        rows: usize,
        whole: bool,
        around: &LinearFusion<'_>,
    ) -> KernelLaunch {
        let next = around.prefetch.filter(|next| self.streams_weights(next.weight.k()));
        let shape = next.and_then(|PrefetchHint { weight, silu_mul: gated }| {
            let channels = weight.scales()?.rows == 1;
            let product = Fp8SmallMProblem { rows, n: weight.n(), k: weight.k(), gated, channels };
            let limits = (self.multiprocessors() as usize, self.shared_bytes() as usize);
            product.choose_launch(rows > IN_KERNEL_PREPARED_ROWS, limits)
        });
        let Some((PrefetchHint { weight, silu_mul }, shape)) = next.zip(shape) else {
            return [0; 6].into_iter().fold(launch.arg_ptr(std::ptr::null()), KernelLaunch::u32);
        };
        let halves = if silu_mul { 2 } else { 1 };
        let bytes = if whole { IDLE_PREFETCH_BYTES } else { PREFETCH_BYTES }.min(weight.k());
        let counts = [weight.n() / halves, halves, weight.k(), shape.strips, shape.blocks, bytes];
        let launch = launch.arg_ptr(weight.as_ptr());
        counts.into_iter().fold(launch, |launch, count| launch.u32(count as u32))
    }

    fn small_m_from_memory(
        &self,
        s: &DeviceStream,
        op: FusedLinear<'_>,
    ) -> Result<(), DeviceError> {
        let FusedLinear { y, x, weight: w, fusion: around } = op;
        let scales = known(w)?;
        let Some((strips, shared_bytes)) = self.fp8_strips(x.rows(), w.n(), w.k(), 1) else {
            let (what, got) = ("rows with their neighbours", x.rows());
            return Err(DeviceError::Shape { kernel: KERNEL, what, got, expected: MAX_ROWS });
        };
        let defines = [
            ("OUT_F32", self.act_f32(KERNEL, y.dtype())?),
            ("NORM", u32::from(around.norm.is_some())),
            ("GATED", u32::from(around.silu_mul)),
            ("RESIDUAL", u32::from(around.add)),
            ("CHANNELS", u32::from(scales.rows == 1)),
            ("TILES", strips as u32),
        ];
        let kernel = self.kernel(&GEMM_SMALL_M, "fp8_gemm_small_m", &defines)?;
        let lines = self.strip_lines();
        let (outputs, width) =
            if around.silu_mul { (w.n() / 2, lines / 2) } else { (w.n(), lines) };
        let blocks = outputs.div_ceil(strips * width);
        let launch = KernelLaunch::new(kernel, (blocks as u32, 1, 1), THREADS, shared_bytes as u32);
        let rows = Fp8SmallMRows { x: x.as_ptr(), factors: std::ptr::null(), stride: x.stride() };
        // SAFETY: the caller checked all shapes; rows are aligned to 16 bytes.
        unsafe { arguments(launch, y, (x.rows(), rows), w, scales, around).launch(self, s) }
    }

    /// Returns the rows of `W` per strip.
    pub(super) fn strip_lines(&self) -> usize {
        if self.warp_size() == 64 { 16 } else { 8 }
    }

    /// Returns strips per block and shared memory in bytes of the kernel without streaming, with `matrices`
    /// weight matrices read concurrently; `None` if the rows of x do not fit into shared memory.
    pub(in super::super) fn fp8_strips(
        &self,
        rows: usize,
        n: usize,
        k: usize,
        matrices: usize,
    ) -> Option<(usize, usize)> {
        let (lines, waves) = (self.strip_lines(), (THREADS / self.warp_size()) as usize);
        let x_bytes = rows * (k.next_multiple_of(BLOCK) + 32) * 2;
        let bytes = |strips: usize| x_bytes + waves * strips * lines * rows * 4;
        let all = matrices * n.div_ceil(lines);
        let wanted = all.div_ceil(2 * self.multiprocessors() as usize);
        let most = wanted.next_power_of_two().min(MAX_STRIPS);
        let strips = [8, 4, 2, 1].into_iter().filter(|strips| *strips <= most);
        let fits = |strips: usize| bytes(strips) <= self.shared_bytes() as usize;
        strips.map(|strips| (strips, bytes(strips))).find(|(strips, _)| fits(*strips))
    }
}

fn arguments(
    launch: KernelLaunch,
    mut y: MatMut<'_>,
    (count, rows): (usize, Fp8SmallMRows),
    w: &PackedMatrix,
    scales: &PackedScales,
    around: &LinearFusion<'_>,
) -> KernelLaunch {
    let y_stride = y.stride() as u32;
    launch
        .overlaps_predecessor()
        .out(&mut y)
        .arg_ptr(rows.x)
        .arg_ptr(rows.factors)
        .arg_ptr(w.as_ptr())
        .arg_ptr(scales.buffer.as_ptr())
        .arg_or_null(around.bias)
        .arg_or_null(around.norm.map(|(norm, _)| norm))
        .u32(count as u32)
        .u32(w.n() as u32)
        .u32(w.k() as u32)
        .u32(y_stride)
        .u32(rows.stride as u32)
        .u32(scales.rows as u32)
        .u32(scales.stride as u32)
        .f32(around.norm.map_or(0.0, |(_, eps)| eps))
}
