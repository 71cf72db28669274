//! Query/key norm, rotation, and the store into the KV pool.

use device::gpu::{KernelDefine, KernelLaunch, KernelSource};
use device::{
    Buffer, DType, DeviceError, DeviceStream, MatMut, check_at_least, check_dtype, check_size,
};

use crate::gpu::GpuBackend;
use crate::{GpuKernel, KvLayout, KvOrder, QkNormRopeArgs, QkNormRopeKvWrite};

static QK_ROPE: KernelSource = KernelSource {
    name: "qk_rope/qk_rope.hip",
    text: include_str!("../../csrc/qk_rope/qk_rope.hip"),
};

const KERNEL: &str = "qk_norm_rope_kv_write";
const THREADS: usize = 128;

impl GpuKernel for QkNormRopeKvWrite<'_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        let Self { mut q, pool: kv, layout, args } = self;
        check(KERNEL, &q, kv, layout, args)?;
        let (tokens, rotary) = (args.qkv.rows(), 2 * args.rope.cos.cols());
        let units = tokens * (args.heads + 2 * layout.kv_heads);
        let blocks = units.div_ceil(THREADS / group(layout.head_dim, rotary)) as u32;
        let kernel = gpu.kernel(
            &QK_ROPE,
            KERNEL,
            &defines(layout, gpu.act_f32(KERNEL, q.dtype())?, rotary),
        )?;
        let first = layout.key_tile(args.layer, 0, 0) * layout.dtype.bytes();
        // SAFETY: the layer lies inside the pool, whose size was checked.
        let layer = unsafe { kv.as_mut_ptr().add(first) };
        let launch = KernelLaunch::new(kernel, (blocks, 1, 1), THREADS as u32, 0)
            .overlaps_predecessor()
            .out(&mut q)
            .arg_ptr(layer)
            .arg(args.qkv)
            .arg_or_null(args.q_norm)
            .arg_or_null(args.k_norm)
            .arg(args.rope.cos)
            .arg(args.rope.sin)
            .arg(args.positions)
            .arg(args.slots)
            .u32(tokens as u32)
            .u32(args.heads as u32)
            .u32(layout.kv_heads as u32)
            .u32(q.stride() as u32)
            .u32(args.qkv.stride() as u32)
            .f32(args.eps)
            .f32(1.0 / args.kv_scales[0])
            .f32(1.0 / args.kv_scales[1]);
        // SAFETY: the shapes agree; positions and slots were checked by whoever staged them.
        unsafe { launch.launch(gpu, s) }
    }
}

fn defines(layout: &KvLayout, act_f32: u32, rotary: usize) -> [KernelDefine; 5] {
    [
        ("ACT_F32", act_f32),
        ("BLOCK_TOKENS", layout.block_tokens as u32),
        ("HEAD_DIM", layout.head_dim as u32),
        ("KV_FP8", u32::from(layout.dtype == DType::F8E4M3)),
        ("ROTARY", rotary as u32),
    ]
}

/// Lanes that share a head: `GROUP` of `csrc/qk_rope/qk_rope.h`.
fn group(head_dim: usize, rotary: usize) -> usize {
    let run = [4, 2, 1].into_iter().find(|run| (rotary / 2).is_multiple_of(*run)).unwrap_or(1);
    (head_dim / 2 / run).next_power_of_two().min(32)
}

/// Refuses what does not fit together; `q` is what comes out, as wide as all query heads.
pub(super) fn check(
    kernel: &'static str,
    q: &MatMut<'_>,
    kv: &Buffer,
    layout: &KvLayout,
    args: &QkNormRopeArgs<'_>,
) -> Result<(), DeviceError> {
    layout.check()?;
    let (tokens, dim) = (args.qkv.rows(), layout.head_dim);
    let size = |what, got, expected| check_size(kernel, what, got, expected);
    size("order of the pool", usize::from(layout.order == KvOrder::Rows), 1)?;
    size("columns of qkv", args.qkv.cols(), (args.heads + 2 * layout.kv_heads) * dim)?;
    size("rows of q", q.rows(), tokens)?;
    size("columns of q", q.cols(), args.heads * dim)?;
    size("positions", args.positions.cols(), tokens)?;
    size("slots", args.slots.cols(), tokens)?;
    size("columns of sin", args.rope.sin.cols(), args.rope.cos.cols())?;
    size("rows of sin", args.rope.sin.rows(), args.rope.cos.rows())?;
    size("stride of cos", args.rope.cos.stride(), args.rope.cos.cols())?;
    size("stride of sin", args.rope.sin.stride(), args.rope.sin.cols())?;
    size("remainder of the stride of qkv", args.qkv.stride() % 4, 0)?;
    size("remainder of the stride of q", q.stride() % 4, 0)?;
    check_at_least(kernel, "head size", dim, 2 * args.rope.cos.cols())?;
    check_at_least(kernel, "layers", layout.layers, args.layer + 1)?;
    check_at_least(kernel, "pool bytes", kv.bytes(), layout.bytes())?;
    layout.check_activations(kernel, "qkv", args.qkv.dtype())?;
    check_dtype(kernel, "q", q.dtype(), args.qkv.dtype())?;
    check_dtype(kernel, "cos", args.rope.cos.dtype(), DType::F32)?;
    check_dtype(kernel, "sin", args.rope.sin.dtype(), DType::F32)?;
    check_dtype(kernel, "positions", args.positions.dtype(), DType::I32)?;
    check_dtype(kernel, "slots", args.slots.dtype(), DType::I64)?;
    for norm in [args.q_norm, args.k_norm].into_iter().flatten() {
        size("norm weight", norm.cols(), dim)?;
        check_dtype(kernel, "norm weight", norm.dtype(), q.dtype())?;
    }
    Ok(())
}
