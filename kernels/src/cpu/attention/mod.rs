//! Paged attention with online softmax, for rows of any query length.
//!
//! Keys are visited in tiles of 64 positions that begin at multiples of 64, and partial results merge
//! at those edges only: what a query sees depends on its own position, never on the chunk it came in
//! or on other rows. Scores, maxima, sums and outputs are f32; probabilities are rounded to the pool's
//! type before they meet the values.

mod portable;

use super::device::{CpuDevice, check_dtype, check_size, for_float};
use super::share::Rows;
use crate::dtype::Float;
use crate::{Attention, Buffer, DType, DeviceError, KvLayout, MatMut};

const KERNEL: &str = "paged_attention";
/// Positions between two merges.
const KEY_TILE: usize = 64;

impl CpuDevice {
    pub(super) fn attend(
        &self,
        mut o: MatMut<'_>,
        (kv, layout): (&Buffer, &KvLayout),
        args: &Attention<'_>,
    ) -> Result<(), DeviceError> {
        check(&o, kv, layout, args)?;
        for_float!(KERNEL, layout.dtype, T => self.attend_of::<T>(&mut o, kv, layout, args));
        Ok(())
    }

    fn attend_of<T: Float>(
        &self,
        o: &mut MatMut<'_>,
        kv: &Buffer,
        layout: &KvLayout,
        args: &Attention<'_>,
    ) {
        let out = Rows::<T>::new(o);
        let dim = layout.head_dim;
        self.threads().split(args.heads, 1, 2, &|heads| {
            for r in 0..args.rows.len() {
                let (from, to) = args.rows.tokens(r);
                let context = args.rows.context(r);
                for head in heads.clone() {
                    for t in from..to {
                        let visible = context - (to - 1 - t);
                        // SAFETY: each head's columns belong to one thread.
                        let y = unsafe { out.part(t, head * dim, dim) };
                        let query = portable::Query { row: r, token: t, head, visible };
                        portable::attend::<T>(y, kv, layout, args, &query);
                    }
                }
            }
        });
    }
}

fn check(
    o: &MatMut<'_>,
    kv: &Buffer,
    layout: &KvLayout,
    args: &Attention<'_>,
) -> Result<(), DeviceError> {
    layout.check()?;
    let size = |what, got, expected| check_size(KERNEL, what, got, expected);
    size("columns of q", args.q.cols(), args.heads * layout.head_dim)?;
    size("rows of o", o.rows(), args.q.rows())?;
    size("columns of o", o.cols(), args.q.cols())?;
    size("pool bytes", kv.bytes().min(layout.bytes()), layout.bytes())?;
    check_dtype(KERNEL, "q", args.q.dtype(), layout.dtype)?;
    check_dtype(KERNEL, "o", o.dtype(), layout.dtype)?;
    check_dtype(KERNEL, "cu_q", args.rows.cu_q.dtype(), DType::I32)?;
    check_dtype(KERNEL, "context_lens", args.rows.context_lens.dtype(), DType::I32)?;
    check_dtype(KERNEL, "block_tables", args.rows.block_tables.dtype(), DType::I32)?;
    if layout.kv_heads == 0 || !args.heads.is_multiple_of(layout.kv_heads) {
        let (what, got, expected) = ("query heads", args.heads, layout.kv_heads);
        return Err(DeviceError::Shape { kernel: KERNEL, what, got, expected });
    }
    if args.layer >= layout.layers {
        let (what, index, limit) = ("layer", args.layer as i64, layout.layers);
        return Err(DeviceError::Index { kernel: KERNEL, what, index, limit });
    }
    args.rows.check(args.q.rows(), layout)
}
