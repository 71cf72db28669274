//! GPU launches for expert parallelism: EPLB expert map, dispatch of tokens to EP ranks, and combination of
//! the returned rows.

use device::gpu::{KernelLaunch, KernelSource};
use device::{DeviceError, DeviceStream, check_at_most, check_dense};

use crate::check::{check_combine, check_dispatch, check_expert_map};
use crate::gpu::GpuBackend;
use crate::{ExpertPlacementLookup, GpuKernel, MoeCombine, MoeDispatchLayout};

static DISPATCH: KernelSource = kernel_source!("moe_dispatch/moe_dispatch.hip");

/// Number of threads per block of `eplb_map_experts`.
const MAP_EXPERTS_THREADS: usize = 256;
/// Maximum number of threads per block of `moe_dispatch`.
const DISPATCH_THREADS: usize = 1024;
/// Maximum number of ranks that `moe_dispatch` supports.
const MAX_RANKS: usize = 64;
/// Number of threads per block, and of columns per block, of `moe_combine_ranks`.
const COMBINE_THREADS: usize = 128;
const COMBINE_COLS: usize = 8 * COMBINE_THREADS;

impl GpuKernel for MoeCombine<'_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        const KERNEL: &str = "moe_combine_ranks";
        let Self { mut y, x, token_rows } = self;
        check_combine(&y, x, token_rows)?;
        let defines = [("ACT_F32", gpu.act_f32(KERNEL, x.dtype())?)];
        let kernel = gpu.kernel(&DISPATCH, KERNEL, &defines)?;
        let (cols, parts) = (y.cols() as u32, y.cols().div_ceil(COMBINE_COLS));
        let (blocks, stride) = ((y.rows() * parts) as u32, y.stride() as u32);
        let launch = KernelLaunch::new(kernel, [blocks, 1, 1], COMBINE_THREADS as u32, 0)
            .overlaps_predecessor()
            .out(&mut y)
            .arg(x)
            .arg(token_rows)
            .u32(cols)
            .u32(parts as u32)
            .u32(token_rows.cols() as u32)
            .u32(x.rows() as u32)
            .u32(stride)
            .u32(x.stride() as u32)
            .u32(token_rows.stride() as u32);
        // SAFETY: `token_rows` has one row per row of `y`; the kernel only reads valid rows of `x`.
        unsafe { launch.launch(gpu, s) }
    }
}

impl GpuKernel for MoeDispatchLayout<'_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        let Self { mut tokens, mut token_rows, mut counts, experts, layout } = self;
        check_dispatch(&tokens, &token_rows, &counts, experts, layout)?;
        check_at_most("moe_dispatch", "ranks", layout.ranks, MAX_RANKS)?;
        let threads = experts.rows().max(1).next_multiple_of(gpu.warp_size() as usize);
        let kernel = gpu.kernel(&DISPATCH, "moe_dispatch", &[("ACT_F32", 1)])?;
        let (grid, block) = ([layout.ranks as u32, 1, 1], threads.min(DISPATCH_THREADS) as u32);
        let stride = token_rows.stride() as u32;
        let launch = KernelLaunch::new(kernel, grid, block, 0)
            .overlaps_predecessor()
            .out(&mut tokens)
            .out(&mut token_rows)
            .out(&mut counts)
            .arg(experts)
            .u32(experts.rows() as u32)
            .u32(experts.cols() as u32)
            .u32(layout.experts_per_rank as u32)
            .u32(layout.ranks as u32)
            .u32(layout.rank_stride as u32)
            .u32(layout.rank_offset as u32)
            .u32(experts.stride() as u32)
            .u32(stride);
        // SAFETY: `check_dispatch` checked that the outputs are large enough for every token on every rank.
        unsafe { launch.launch(gpu, s) }
    }
}

impl GpuKernel for ExpertPlacementLookup<'_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        const KERNEL: &str = "eplb_map_experts";
        let Self { mut experts, positions, tokens, placement } = self;
        check_expert_map(experts.as_ref(), positions, tokens, placement)?;
        check_dense(KERNEL, "row stride of expert ids", experts.as_ref())?;
        check_dense(KERNEL, "row stride of placement", placement)?;
        let routed_pairs = experts.rows() * experts.cols();
        let kernel = gpu.kernel(&DISPATCH, KERNEL, &[("ACT_F32", 1)])?;
        let blocks = routed_pairs.div_ceil(MAP_EXPERTS_THREADS) as u32;
        let k = experts.cols() as u32;
        let launch = KernelLaunch::new(kernel, [blocks, 1, 1], MAP_EXPERTS_THREADS as u32, 0)
            .overlaps_predecessor()
            .out(&mut experts)
            .arg(positions)
            .arg_or_null(tokens)
            .arg(placement)
            .u32(routed_pairs as u32)
            .u32(k)
            .u32(positions.cols() as u32)
            .u32(placement.rows() as u32)
            .u32(placement.cols() as u32);
        // SAFETY: the shapes were checked; the kernel only reads valid positions and rows of `placement`.
        unsafe { launch.launch(gpu, s) }
    }
}
