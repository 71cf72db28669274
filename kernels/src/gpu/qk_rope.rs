//! GPU launches of query and key norm, RoPE and the write to the KV pool, in one kernel.

use device::gpu::{KernelLaunch, KernelSource};
use device::{DType, DeviceError, DeviceStream, MatMut, check_size};

use super::norm::norm_f32;
use crate::gpu::GpuBackend;
use crate::{GpuKernel, KvCacheScales, KvLayout, KvTileOrder, QkNormRopeArgs, QkNormRopeKvWrite};

static QK_ROPE: KernelSource = kernel_source!("qk_rope/qk_rope.hip");

const KERNEL: &str = "qk_norm_rope_kv_write";
const THREADS: usize = 128;

/// Appends the kernel arguments of the norms and of RoPE: QKV projections, norm weights, RoPE tables,
/// positions, slots.
pub(super) fn rope_inputs(launch: KernelLaunch, args: &QkNormRopeArgs<'_>) -> KernelLaunch {
    launch
        .arg(args.qkv)
        .arg_or_null(args.q_norm)
        .arg_or_null(args.k_norm)
        .arg(args.rope.cos)
        .arg(args.rope.sin)
        .arg(args.positions)
        .arg(args.slots)
}

impl GpuKernel for QkNormRopeKvWrite<'_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        self.check()?;
        let Self { mut q, pool: kv, layout, args } = self;
        check_strides(KERNEL, &q, layout, args)?;
        let (tokens, rotary) = (args.qkv.rows(), 2 * args.rope.cos.cols());
        let units = tokens * (args.heads + 2 * layout.kv_heads);
        let blocks = units.div_ceil(THREADS / group(layout.head_dim, rotary)) as u32;
        let act_f32 = gpu.act_f32(KERNEL, q.dtype())?;
        let activations = q.dtype();
        let norm_f32 = norm_f32(args.norm_dtype().unwrap_or(activations), activations);
        let defines = [
            ("ACT_F32", act_f32),
            ("BLOCK_TOKENS", layout.block_tokens as u32),
            ("HEAD_DIM", layout.head_dim as u32),
            ("KV_FP8", u32::from(layout.dtype == DType::F8E4M3)),
            ("ROTARY_DIM", rotary as u32),
            norm_f32,
        ];
        let kernel = gpu.kernel(&QK_ROPE, KERNEL, &defines)?;
        let first = layout.key_tile(args.layer, 0, 0) * layout.dtype.bytes();
        // SAFETY: the layer is inside the pool, whose size was checked.
        let layer = unsafe { kv.as_mut_ptr().add(first) };
        let launch = KernelLaunch::new(kernel, [blocks, 1, 1], THREADS as u32, 0)
            .overlaps_predecessor()
            .out(&mut q)
            .arg_ptr(layer);
        let (key_factor, value_factor, head_factors) = match args.kv_scales {
            KvCacheScales::Layer { key, value } => (1.0 / key, 1.0 / value, None),
            KvCacheScales::Heads(factors) => (1.0, 1.0, Some(factors)),
        };
        let launch = rope_inputs(launch, args)
            .u32(tokens as u32)
            .u32(args.heads as u32)
            .u32(layout.kv_heads as u32)
            .u32(q.stride() as u32)
            .u32(args.qkv.stride() as u32)
            .f32(args.eps)
            .f32(key_factor)
            .f32(value_factor);
        let launch = match layout.dtype {
            DType::F8E4M3 => launch.arg_or_null(head_factors),
            _ => launch,
        };
        // SAFETY: the shapes were checked; the host checked the staged positions and slots.
        unsafe { launch.launch(gpu, s) }
    }
}

/// Returns the number of lanes of a warp that process one head together; must match `GROUP` in
/// `csrc/qk_rope/qk_rope.h`.
fn group(head_dim: usize, rotary: usize) -> usize {
    let run = [4, 2, 1].into_iter().find(|run| (rotary / 2).is_multiple_of(*run)).unwrap_or(1);
    (head_dim / 2 / run).next_power_of_two().min(32)
}

/// Checks that the kernel supports the KV layout and the row strides.
pub(super) fn check_strides(
    kernel: &'static str,
    q: &MatMut<'_>,
    layout: &KvLayout,
    args: &QkNormRopeArgs<'_>,
) -> Result<(), DeviceError> {
    let size = |what, got, expected| check_size(kernel, what, got, expected);
    size("layout of the KV pool", usize::from(layout.order == KvTileOrder::RowMajor), 1)?;
    size("stride of cos", args.rope.cos.stride(), args.rope.cos.cols())?;
    size("stride of sin", args.rope.sin.stride(), args.rope.sin.cols())?;
    size("row stride of qkv modulo 4", args.qkv.stride() % 4, 0)?;
    size("row stride of q modulo 4", q.stride() % 4, 0)
}
