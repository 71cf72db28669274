//! MLA prologue on the CPU: RMS norm of the compressed KV, RoPE of key and query channels, and the write of
//! KV rows to the pool.

use device::{Buffer, DeviceError, FloatElement, MatMut, check_size};

use super::super::backend::for_float;
use super::super::elementwise::min_rows;
use super::super::norm::RmsNormRow;
use super::super::row_kernel::{RowKernel, dispatch};
use super::super::shared_rows::{SendPtr, SharedRows};
use crate::cpu::CpuBackend;
use crate::{CpuKernel, MlaKvLayout, MlaPrologue, MlaPrologueArgs};

const KERNEL: &str = "mla_kv_write";

/// Row kernel: interleaved RoPE, which rotates each pair of channels `2 i` and `2 i + 1`, in place.
struct InterleavedRope<'a, T> {
    x: &'a mut [T],
    cos: &'a [f32],
    sin: &'a [f32],
}

impl<T: FloatElement> RowKernel for InterleavedRope<'_, T> {
    #[inline(always)]
    fn run(self) {
        let pairs = self.x.as_chunks_mut::<2>().0.iter_mut();
        for (([a, b], cos), sin) in pairs.zip(self.cos).zip(self.sin) {
            let (x, y) = (a.load(), b.load());
            *a = T::store(x * cos - y * sin);
            *b = T::store(y * cos + x * sin);
        }
    }
}

impl CpuBackend {
    fn rope_and_write<T: FloatElement>(
        &self,
        q: &mut MatMut<'_>,
        kv: &mut Buffer,
        layout: &MlaKvLayout,
        args: &MlaPrologueArgs<'_>,
    ) {
        let (isa, pool) = (self.isa(), SendPtr(kv.as_mut_ptr().cast::<T>()));
        let (head_dim, rotary) = (q.cols() / args.heads.max(1), layout.rope_dim);
        let out = SharedRows::<T>::new(q);
        let work = args.kv.cols() + args.heads * head_dim;
        self.threads().split(args.kv.rows(), 1, min_rows(work), &|range| {
            for t in range {
                let position = args.positions.row::<i32>(0)[t] as usize;
                let (cos, sin) = (args.rope.cos.row(position), args.rope.sin.row(position));
                for head in 0..args.heads {
                    // SAFETY: each token, with its queries, belongs to one thread.
                    let x = unsafe { out.part(t, (head + 1) * head_dim - rotary, rotary) };
                    dispatch(isa, InterleavedRope { x, cos, sin });
                }
                let Ok(slot) = usize::try_from(args.slots.row::<i64>(0)[t]) else { continue };
                // SAFETY: slots and layer were checked, so the row is inside the pool; tokens have distinct
                // slots.
                let row = unsafe {
                    let start = pool.get().add(layout.row(args.layer, slot));
                    std::slice::from_raw_parts_mut(start, layout.width())
                };
                let (compressed_kv, rope_key) = row.split_at_mut(layout.kv_lora_rank);
                let (c, key) = args.kv.row::<T>(t).split_at(layout.kv_lora_rank);
                dispatch(
                    isa,
                    RmsNormRow { y: compressed_kv, x: c, w: args.norm.row::<T>(0), eps: args.eps },
                );
                rope_key.copy_from_slice(key);
                dispatch(isa, InterleavedRope { x: rope_key, cos, sin });
            }
        });
    }
}

impl CpuKernel for MlaPrologue<'_> {
    fn run(self, cpu: &CpuBackend) -> Result<(), DeviceError> {
        let Self { mut q, pool: kv, layout, args } = self;
        check(&q, kv, layout, args)?;
        for_float!(KERNEL, layout.dtype, T => cpu.rope_and_write::<T>(&mut q, kv, layout, args));
        Ok(())
    }
}

fn check(
    q: &MatMut<'_>,
    kv: &Buffer,
    layout: &MlaKvLayout,
    args: &MlaPrologueArgs<'_>,
) -> Result<(), DeviceError> {
    args.check_shapes(q, layout)?;
    check_size(KERNEL, "pool bytes", kv.bytes().min(layout.bytes()), layout.bytes())?;
    let index = |what, index: i64, limit: usize| {
        if index < limit as i64 {
            return Ok(());
        }
        Err(DeviceError::Index { kernel: KERNEL, what, index, limit })
    };
    index("layer", args.layer as i64, layout.layers)?;
    for &p in args.positions.row::<i32>(0) {
        index("position", i64::from(p as u32), args.rope.cos.rows())?;
    }
    for &slot in args.slots.row::<i64>(0) {
        index("slot", slot, layout.slots())?;
    }
    Ok(())
}
