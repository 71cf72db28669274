//! GPU launches of the one-shot (custom) all-reduce through memory that the GPUs of one host can access
//! (`csrc/one_shot_all_reduce/peer_exchange.h`).

use device::gpu::{KernelDefine, KernelLaunch, KernelSource, PeerMemoryView};
use device::{DType, DeviceError, DeviceStream, MatRef, check_at_most, check_dtype, check_size};

use super::norm::norm_f32;
use crate::gpu::GpuBackend;
use crate::op::check_norm_dtype;
use crate::{AllReduceShape, GpuKernel, OneShotAllReduce, OneShotAllReduceNorm};

static ONE_SHOT_ALL_REDUCE: KernelSource =
    kernel_source!("one_shot_all_reduce/one_shot_all_reduce.hip");

const NORM_KERNEL: &str = "one_shot_all_reduce_norm";
const THREADS: u32 = 256;
const EIGHT: usize = 8;
/// Maximum number of groups of eight columns that a thread of the fused all-reduce and norm kernel processes.
const EIGHTS_PER_THREAD: usize = 2;

impl OneShotAllReduce<'_> {
    /// Whether the kernel supports a matrix of this shape; the result is equal on all ranks.
    #[must_use]
    pub fn fits(gpu: &GpuBackend, peers: &PeerMemoryView, shape: AllReduceShape) -> bool {
        let AllReduceShape { rows, cols, dtype } = shape;
        let bytes = rows * cols * dtype.bytes();
        (dtype == DType::F32 || dtype == gpu.half_dtype())
            && (1..=peers.limit_bytes()).contains(&bytes)
    }
}

impl OneShotAllReduceNorm<'_> {
    /// Whether the kernel with a fused norm supports a matrix of this shape; the result is equal on all
    /// ranks.
    #[must_use]
    pub fn fits(gpu: &GpuBackend, peers: &PeerMemoryView, shape: AllReduceShape) -> bool {
        let cols = shape.cols;
        let in_registers = cols.is_multiple_of(EIGHT)
            && cols <= EIGHTS_PER_THREAD * EIGHT * gpu.norm_threads(cols) as usize;
        in_registers && OneShotAllReduce::fits(gpu, peers, shape)
    }
}

impl GpuKernel for OneShotAllReduce<'_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        const KERNEL: &str = "one_shot_all_reduce";
        let Self { mut x, peers } = self;
        peers.check_device(KERNEL, gpu)?;
        let (rows, cols, dtype) = (x.rows(), x.cols(), x.dtype());
        check_at_most(KERNEL, "bytes", rows * cols * dtype.bytes(), peers.limit_bytes())?;
        let stride = if rows > 1 { x.stride() } else { cols };
        check_size(KERNEL, "row stride", stride, cols)?;
        let defines = defines(gpu, peers, KERNEL, dtype)?;
        let kernel = gpu.kernel(&ONE_SHOT_ALL_REDUCE, KERNEL, &defines)?;
        let target_blocks = (rows * cols).div_ceil(EIGHT * THREADS as usize);
        let launch = KernelLaunch::new(kernel, [blocks(gpu, target_blocks), 1, 1], THREADS, 0);
        let launch = rank_args(launch.overlaps_predecessor().out(&mut x), peers);
        // SAFETY: the matrix has `rows * cols` elements, and the shared memory of each rank is large enough
        // for them; the arguments match the kernel parameters.
        unsafe { launch.u32((rows * cols) as u32).launch(gpu, s) }
    }
}

impl GpuKernel for OneShotAllReduceNorm<'_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        const KERNEL: &str = NORM_KERNEL;
        let Self { mut y, mut x, delta, weight, eps, peers } = self;
        peers.check_device(KERNEL, gpu)?;
        let (rows, cols, dtype) = (delta.rows(), delta.cols(), delta.dtype());
        check_norm(y.as_ref(), x.as_ref(), delta, weight)?;
        check_at_most(KERNEL, "bytes", rows * cols * dtype.bytes(), peers.limit_bytes())?;
        let threads = gpu.norm_threads(cols);
        check_at_most(KERNEL, "columns", cols, EIGHTS_PER_THREAD * EIGHT * threads as usize)?;
        let [act, ranks] = defines(gpu, peers, KERNEL, dtype)?;
        let defines = [act, ranks, norm_f32(weight.dtype(), dtype)];
        let kernel = gpu.kernel(&ONE_SHOT_ALL_REDUCE, KERNEL, &defines)?;
        let launch = KernelLaunch::new(kernel, [blocks(gpu, rows), 1, 1], threads, 0)
            .overlaps_predecessor()
            .out(&mut y)
            .out(&mut x)
            .arg(delta)
            .arg(weight);
        let launch = rank_args(launch, peers)
            .u32(rows as u32)
            .u32(cols as u32)
            .u32(y.stride() as u32)
            .u32(x.stride() as u32)
            .u32(delta.stride() as u32)
            .f32(eps);
        // SAFETY: shapes and addresses were checked; the arguments match the kernel parameters.
        unsafe { launch.launch(gpu, s) }
    }
}

fn defines(
    gpu: &GpuBackend,
    peers: &PeerMemoryView,
    kernel: &'static str,
    dtype: DType,
) -> Result<[KernelDefine; 2], DeviceError> {
    Ok([("ACT_F32", gpu.act_f32(kernel, dtype)?), ("RANKS", peers.ranks() as u32)])
}

/// Returns the grid size: at most one block per SM, so that all blocks are resident at once. It is equal on
/// all ranks, which have identical devices.
fn blocks(gpu: &GpuBackend, target_blocks: usize) -> u32 {
    target_blocks.min(gpu.multiprocessors() as usize) as u32
}

/// Appends the kernel arguments that describe the ranks: addresses of their shared memory, launch counters,
/// abort flag, size of the shared memory, and rank.
fn rank_args(launch: KernelLaunch, peers: &PeerMemoryView) -> KernelLaunch {
    launch
        .arg_words(&peers.addresses())
        .arg_ptr(peers.launch_counters())
        .arg_ptr(peers.aborted())
        .arg_words(&[PeerMemoryView::area_bytes(peers.limit_bytes()) as u64])
        .u32(peers.rank() as u32)
}

fn check_norm(
    y: MatRef<'_>,
    x: MatRef<'_>,
    delta: MatRef<'_>,
    weight: MatRef<'_>,
) -> Result<(), DeviceError> {
    const KERNEL: &str = NORM_KERNEL;
    let (rows, cols, dtype) = (delta.rows(), delta.cols(), delta.dtype());
    for (what, mat) in [("output", y), ("residual", x)] {
        check_size(KERNEL, "rows", mat.rows(), rows)?;
        check_size(KERNEL, "columns", mat.cols(), cols)?;
        check_dtype(KERNEL, what, mat.dtype(), dtype)?;
    }
    check_size(KERNEL, "weight", weight.cols(), cols)?;
    check_norm_dtype(KERNEL, "weight", weight.dtype(), dtype)?;
    check_size(KERNEL, "columns modulo 8", cols % EIGHT, 0)?;
    for x in [y, x, delta, weight] {
        let misalignment = (x.as_ptr() as usize | (x.stride() * x.dtype().bytes())) % 16;
        check_size(KERNEL, "alignment modulo 16", misalignment, 0)?;
    }
    Ok(())
}
