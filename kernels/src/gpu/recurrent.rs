//! GPU launches of the gated delta net and of output gates.

use device::gpu::{KernelLaunch, KernelSource};
use device::{Buffer, DeviceError, DeviceStream, check_at_most, check_dense, check_size};

use super::elementwise::{THREADS as GATE_THREADS, blocks_per_row};
use super::gdn_chunk::{ChunkedRule, RECURRENT_TOKENS};
use super::gemm::check_16_byte_rows;
use crate::gpu::GpuBackend;
use crate::{
    CausalConvolution, GatedDeltaRule, GatedRmsNorm, GpuKernel, RecurrentStateLayout,
    SigmoidGating, StateSlotRows,
};

static GDN: KernelSource = kernel_source!("gdn/gdn.hip");
static OUTPUT_GATE: KernelSource = kernel_source!("output_gate/output_gate.hip");

/// Number of threads per block of the convolution.
const CONV_THREADS: u32 = 128;
/// Number of channels per thread of the convolution; `CHANNELS` of gdn/gdn.hip.
const CONV_CHANNELS: usize = 8;
/// Number of tokens per thread of the convolution if rows have several tokens; `CONV_CHUNK` of gdn/gdn.hip.
const CONV_CHUNK: usize = 8;
/// Number of value columns per block of the recurrent delta rule; `SLICE` of gdn/state_slice.h.
const SLICE: usize = 64;
/// Number of warps per block of the recurrent delta rule; `SLICE_WARPS` of gdn/state_slice.h.
pub(super) const SLICE_WARPS: usize = 4;
/// Maximum number of key channels per lane, which bounds the registers of the state.
const LANE_KEYS_MAX: usize = 32;
/// Number of threads per block of the gated norm; a warp computes one head.
const NORM_THREADS: u32 = 128;

/// Appends the rows of a step and their state slots as kernel arguments.
pub(super) fn row_args(launch: KernelLaunch, rows: &StateSlotRows<'_>) -> KernelLaunch {
    launch.arg(rows.cu_q).arg(rows.read).arg(rows.write)
}

/// Returns the address of a state of layer `layer` in slot 0, which begins `offset` bytes after the layer's state.
pub(super) fn state_ptr(
    pool: &mut Buffer,
    layout: &RecurrentStateLayout,
    layer: usize,
    offset: usize,
) -> *mut u8 {
    // SAFETY: the layer is inside the pool, whose size was checked.
    unsafe { pool.as_mut_ptr().add(layout.state_offset(layer, 0) + offset) }
}

impl GpuKernel for CausalConvolution<'_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        self.check()?;
        check_dense(Self::KERNEL, "weight", self.weight)?;
        let Self { mut y, x, weight, pool, layout, layer, rows } = self;
        let defines = [
            ("ACT_F32", gpu.act_f32(Self::KERNEL, x.dtype())?),
            ("CONV_WIDTH", layout.conv_width as u32),
            ("KEY_DIM", key_dim(gpu, layout)?),
        ];
        let channels = layout.conv_channels();
        check_size(Self::KERNEL, "channels modulo 8", channels % CONV_CHANNELS, 0)?;
        check_16_byte_rows(x)?;
        check_size(Self::KERNEL, "row stride of y modulo 8", y.stride() % CONV_CHANNELS, 0)?;
        let blocks = (channels / CONV_CHANNELS).div_ceil(CONV_THREADS as usize) as u32;
        let channels = channels as u32;
        let slot_stride = (layout.bytes_per_layer() / size_of::<f32>()) as u64;
        let states = state_ptr(pool, layout, layer, layout.conv_offset());
        let chunk = if rows.max_row_len > 1 { CONV_CHUNK } else { 1 };
        let grid = [blocks, y.rows().div_ceil(chunk) as u32, 1];
        let kernel = gpu.kernel(&GDN, Self::KERNEL, &defines)?;
        let launch = KernelLaunch::new(kernel, grid, CONV_THREADS, 0)
            .overlaps_predecessor()
            .out(&mut y)
            .arg(x)
            .arg(weight)
            .arg_ptr(states);
        let launch = row_args(launch, &rows)
            .u32(rows.rows() as u32)
            .u32(y.rows() as u32)
            .u32(channels)
            .u32(y.stride() as u32)
            .u32(x.stride() as u32)
            .u32(chunk as u32)
            .arg_words(&[slot_stride]);
        // SAFETY: the shapes were checked; the host checked the staged rows and state slots; the arguments match the
        // kernel parameters.
        unsafe { launch.launch(gpu, s) }?;
        if rows.max_row_len <= 1 {
            return Ok(());
        }
        let grid = [blocks, rows.rows() as u32, 1];
        let kernel = gpu.kernel(&GDN, "gdn_conv_state", &defines)?;
        let launch = KernelLaunch::new(kernel, grid, CONV_THREADS, 0)
            .overlaps_predecessor()
            .arg(x)
            .arg_ptr(states);
        let launch =
            row_args(launch, &rows).u32(channels).u32(x.stride() as u32).arg_words(&[slot_stride]);
        // SAFETY: as above.
        unsafe { launch.launch(gpu, s) }
    }
}

impl GpuKernel for GatedDeltaRule<'_> {
    fn launch(mut self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        self.check()?;
        let chunked = ChunkedRule::choose(gpu, &self);
        // The form depends on the length of the row, not on the other rows of the step.
        let max_tokens = chunked.as_ref().map_or(u32::MAX, |_| RECURRENT_TOKENS as u32);
        launch_recurrent(gpu, s, &mut self, max_tokens)?;
        chunked.map_or(Ok(()), |rule| rule.launch(gpu, s, self))
    }
}

/// Launches the recurrent form for the rows of at most `max_tokens` tokens and for padding.
fn launch_recurrent(
    gpu: &GpuBackend,
    s: &DeviceStream,
    op: &mut GatedDeltaRule<'_>,
    max_tokens: u32,
) -> Result<(), DeviceError> {
    const KERNEL: &str = GatedDeltaRule::KERNEL;
    let (layout, rows) = (op.layout, op.rows);
    check_size(KERNEL, "row stride of qkv modulo 8", op.qkv.stride() % 8, 0)?;
    check_size(KERNEL, "row stride of o modulo 8", op.o.stride() % 8, 0)?;
    let defines = [
        ("ACT_F32", gpu.act_f32(KERNEL, op.qkv.dtype())?),
        ("CONV_WIDTH", layout.conv_width as u32),
        ("KEY_DIM", key_dim(gpu, layout)?),
    ];
    let slot_stride = (layout.bytes_per_layer() / size_of::<f32>()) as u64;
    let grid = [rule_blocks(KERNEL, layout)?, rows.rows() as u32 + 1, 1];
    let threads = SLICE_WARPS as u32 * gpu.warp_size();
    let tokens = op.o.rows() as u32;
    let kernel = gpu.kernel(&GDN, KERNEL, &defines)?;
    let launch = KernelLaunch::new(kernel, grid, threads, 0)
        .overlaps_predecessor()
        .out(&mut op.o)
        .arg(op.qkv)
        .arg(op.beta)
        .arg(op.decay)
        .arg(op.a_log)
        .arg(op.dt_bias)
        .arg_ptr(state_ptr(op.pool, layout, op.layer, 0));
    let launch = row_args(launch, &rows)
        .u32(rows.rows() as u32)
        .u32(tokens)
        .u32(max_tokens)
        .u32(layout.key_heads as u32)
        .u32(layout.value_heads as u32)
        .u32(layout.value_dim as u32)
        .u32(op.o.stride() as u32)
        .u32(op.qkv.stride() as u32)
        .u32(op.beta.stride() as u32)
        .u32(op.decay.stride() as u32)
        .arg_words(&[slot_stride]);
    // SAFETY: the shapes were checked; the host checked the staged rows and state slots; the arguments match the kernel
    // parameters.
    unsafe { launch.launch(gpu, s) }
}

/// Returns the number of blocks that update the states of a row in a layer.
pub(super) fn rule_blocks(
    kernel: &'static str,
    layout: &RecurrentStateLayout,
) -> Result<u32, DeviceError> {
    check_size(kernel, "value channels modulo 8", layout.value_dim % 8, 0)?;
    Ok((layout.value_heads * layout.value_dim.div_ceil(SLICE)) as u32)
}

/// Returns the key channels per head, if the delta rule supports them on this GPU.
pub(super) fn key_dim(gpu: &GpuBackend, layout: &RecurrentStateLayout) -> Result<u32, DeviceError> {
    const KERNEL: &str = GatedDeltaRule::KERNEL;
    let lanes = gpu.warp_size() as usize * SLICE_WARPS * 4 / SLICE;
    check_size(KERNEL, "linear_key_head_dim modulo the lanes of a key", layout.key_dim % lanes, 0)?;
    check_at_most(KERNEL, "key channels per lane", layout.key_dim / lanes, LANE_KEYS_MAX)?;
    Ok(layout.key_dim as u32)
}

impl GpuKernel for GatedRmsNorm<'_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        self.check()?;
        let Self { mut y, x, z, weight, eps } = self;
        let defines = [("ACT_F32", gpu.act_f32(Self::KERNEL, x.dtype())?)];
        let heads = y.cols() / weight.cols();
        let warps = NORM_THREADS / gpu.warp_size();
        let blocks = ((y.rows() * heads) as u32).div_ceil(warps);
        let kernel = gpu.kernel(&OUTPUT_GATE, Self::KERNEL, &defines)?;
        let launch = KernelLaunch::new(kernel, [blocks, 1, 1], NORM_THREADS, 0)
            .overlaps_predecessor()
            .out(&mut y)
            .arg(x)
            .arg(z)
            .arg(weight)
            .u32(y.rows() as u32)
            .u32(heads as u32)
            .u32(weight.cols() as u32)
            .u32(y.stride() as u32)
            .u32(x.stride() as u32)
            .u32(z.stride() as u32)
            .f32(eps);
        // SAFETY: the shapes were checked; the arguments match the kernel parameters.
        unsafe { launch.launch(gpu, s) }
    }
}

impl GpuKernel for SigmoidGating<'_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        self.check()?;
        let Self { mut x, gate } = self;
        let defines = [("ACT_F32", gpu.act_f32(Self::KERNEL, x.dtype())?)];
        let parts = blocks_per_row(x.cols());
        let kernel = gpu.kernel(&OUTPUT_GATE, Self::KERNEL, &defines)?;
        let blocks = (x.rows() * parts) as u32;
        let launch = KernelLaunch::new(kernel, [blocks, 1, 1], GATE_THREADS, 0)
            .overlaps_predecessor()
            .out(&mut x)
            .arg(gate)
            .u32(x.cols() as u32)
            .u32(parts as u32)
            .u32(x.stride() as u32)
            .u32(gate.stride() as u32);
        // SAFETY: the shapes were checked; the arguments match the kernel parameters.
        unsafe { launch.launch(gpu, s) }
    }
}
