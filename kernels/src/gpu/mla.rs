//! MLA on GPUs. The prologue applies RMS norm and RoPE and writes KV rows. Rows of few tokens use absorbed
//! attention on tensor cores (`mla_decode.rs`), rows of many tokens non-absorbed attention
//! (`mla_prefill.rs`). All other shapes use the unoptimised reference kernel `mla_plain`.

use device::gpu::{KernelLaunch, KernelSource};
use device::{
    DType, DeviceError, DeviceStream, MatMut, check_at_least, check_at_most, check_dtype,
    check_size,
};

use super::attention::LOG2_E;
use super::mla_prefill::MlaPrefillLaunchArgs;
use crate::gpu::GpuBackend;
use crate::{
    GpuKernel, MlaAttention, MlaAttentionArgs, MlaKvLayout, MlaPrologue, PackedMatrixGroup,
};

static WRITE: KernelSource = kernel_source!("mla_kv_write/mla_kv_write.hip");
static PLAIN: KernelSource = kernel_source!("mla_plain/mla_plain.hip");

const THREADS: u32 = 256;
/// Maximum `kv_lora_rank` that the reference kernel `mla_plain` supports.
const PLAIN_KV_LORA_RANK_MAX: usize = 1024;

impl GpuBackend {
    fn attend_mla_plain(
        &self,
        s: &DeviceStream,
        o: &mut MatMut<'_>,
        pool: *const u8,
        layout: &MlaKvLayout,
        args: &MlaAttentionArgs<'_>,
    ) -> Result<(), DeviceError> {
        const KERNEL: &str = "mla_plain";
        check_at_most(KERNEL, "kv_lora_rank", layout.kv_lora_rank, PLAIN_KV_LORA_RANK_MAX)?;
        let (w_uk, w_uv, rows) = (args.heads.w_uk, args.heads.w_uv, &args.rows);
        let defines = [
            ("ACT_F32", self.act_f32(KERNEL, layout.dtype)?),
            ("BLOCK_TOKENS", layout.block_tokens as u32),
            ("KV_LORA_RANK", layout.kv_lora_rank as u32),
            ("QK_ROPE_HEAD_DIM", layout.rope_dim as u32),
            ("QK_NOPE_HEAD_DIM", w_uk.n() as u32),
            ("VALUE", w_uv.n() as u32),
        ];
        let kernel = self.kernel(&PLAIN, KERNEL, &defines)?;
        let (grid, o_stride) = ([o.rows() as u32, w_uk.len() as u32, 1], o.stride() as u32);
        let launch = KernelLaunch::new(kernel, grid, THREADS, 0)
            .overlaps_predecessor()
            .out(o)
            .arg(args.q)
            .arg_ptr(pool)
            .arg_ptr(w_uk.as_ptr())
            .arg_ptr(w_uv.as_ptr())
            .arg(rows.cu_q)
            .arg(rows.context_lens)
            .arg(rows.block_tables)
            .arg_or_null(rows.table_rows)
            .u32(rows.len() as u32)
            .u32(rows.block_tables.stride() as u32)
            .u32(args.q.stride() as u32)
            .u32(o_stride)
            .u32(args.first_position as u32)
            .f32(args.scale * LOG2_E);
        // SAFETY: the shapes were checked; the caller guarantees context lengths and block tables.
        unsafe { launch.launch(self, s) }
    }
}

impl GpuKernel for MlaAttention<'_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        const KERNEL: &str = "mla_attention";
        let Self { mut o, pool: kv, layout, args } = self;
        args.check_shapes(&o, layout)?;
        check_at_least(KERNEL, "layers", layout.layers, args.layer + 1)?;
        check_at_least(KERNEL, "pool bytes", kv.bytes(), layout.bytes())?;
        let heads = &args.heads;
        check_dtype(KERNEL, "key", heads.w_uk.dtype(), layout.dtype)?;
        check_dtype(KERNEL, "value", heads.w_uv.dtype(), layout.dtype)?;
        let transposed = heads.w_uk_t.map_or(layout.dtype, PackedMatrixGroup::dtype);
        check_dtype(KERNEL, "key_transposed", transposed, layout.dtype)?;
        let layer_offset = layout.row(args.layer, 0) * layout.dtype.bytes();
        // SAFETY: the layer is inside the pool, whose size was checked.
        let pool = unsafe { kv.as_ptr().add(layer_offset) };
        let expanded = gpu.plan_mla_prefill(layout, pool, args, &o);
        let Some(absorbed) = gpu.plan_mla_decode(layout, pool, args, expanded.is_some())? else {
            return gpu.attend_mla_plain(s, &mut o, pool, layout, args);
        };
        // Absorbed and non-absorbed attention use the same scratch memory, one after the other. The larger of
        // their sizes is allocated first, so that the scratch memory is not reallocated between them.
        let expanded_bytes = expanded.as_ref().map_or(0, MlaPrefillLaunchArgs::scratch_bytes);
        gpu.scratch(s, expanded_bytes.max(absorbed.scratch_bytes()))?;
        gpu.attend_mla_absorbed(s, &mut o, &absorbed)?;
        expanded.map_or(Ok(()), |call| gpu.attend_mla_non_absorbed(s, &mut o, &call))
    }
}

impl GpuKernel for MlaPrologue<'_> {
    fn launch(self, gpu: &GpuBackend, s: &DeviceStream) -> Result<(), DeviceError> {
        const KERNEL: &str = "mla_kv_write";
        let Self { mut q, pool: kv, layout, args } = self;
        args.check_shapes(&q, layout)?;
        check_at_least(KERNEL, "layers", layout.layers, args.layer + 1)?;
        check_at_least(KERNEL, "pool bytes", kv.bytes(), layout.bytes())?;
        check_size(KERNEL, "stride of cos", args.rope.cos.stride(), args.rope.cos.cols())?;
        check_size(KERNEL, "stride of sin", args.rope.sin.stride(), args.rope.sin.cols())?;
        check_dtype(KERNEL, "positions", args.positions.dtype(), DType::I32)?;
        check_dtype(KERNEL, "slots", args.slots.dtype(), DType::I64)?;
        let defines = [
            ("ACT_F32", gpu.act_f32(KERNEL, layout.dtype)?),
            ("KV_LORA_RANK", layout.kv_lora_rank as u32),
            ("QK_ROPE_HEAD_DIM", layout.rope_dim as u32),
        ];
        let kernel = gpu.kernel(&WRITE, KERNEL, &defines)?;
        let layer_offset = layout.row(args.layer, 0) * layout.dtype.bytes();
        // SAFETY: the layer is inside the pool, whose size was checked.
        let layer = unsafe { kv.as_mut_ptr().add(layer_offset) };
        let width = q.cols() / args.heads.max(1);
        let launch = KernelLaunch::new(kernel, [args.kv.rows() as u32, 1, 1], THREADS, 0)
            .overlaps_predecessor()
            .out(&mut q)
            .arg_ptr(layer)
            .arg(args.kv)
            .arg(args.norm)
            .arg(args.rope.cos)
            .arg(args.rope.sin)
            .arg(args.positions)
            .arg(args.slots)
            .u32(args.heads as u32)
            .u32(width as u32)
            .u32(q.stride() as u32)
            .u32(args.kv.stride() as u32)
            .f32(args.eps);
        // SAFETY: the shapes were checked; the host checked the staged positions and slots.
        unsafe { launch.launch(gpu, s) }
    }
}
