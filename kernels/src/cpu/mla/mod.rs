//! Multi-head latent attention (MLA) on the CPU, in two forms that are equal in exact arithmetic.
//!
//! *Non-absorbed*: keys and values of every head are up-projected from the compressed KV, then attended to by
//! ordinary attention. *Absorbed*: queries are multiplied by W_UKᵀ instead, since `(W_UKᵀ q)ᵀ c = qᵀ (W_UK
//! c)`, and one W_UV projection follows the weighted mean of the compressed KV `c`: this is less work for
//! rows with few queries and many keys. In f32, the reference, every row is non-absorbed, so that its result
//! does not depend on its prefill chunk; in bf16 and f16, rows of few tokens are absorbed.

mod absorbed_attention;
mod kv_write;
mod non_absorbed_attention;

use device::{Buffer, DeviceError, MatMut, check_size};

use super::backend::for_float;
use crate::cpu::CpuBackend;
use crate::{AttentionKeyRange, CpuKernel, MlaAttention, MlaAttentionArgs, MlaKvLayout};

const KERNEL: &str = "mla_attention";
/// Maximum number of tokens of a row that uses absorbed MLA, in 16-bit types. By multiplications alone both
/// forms cost the same at `C (M + V) / (2 C − M − V)` tokens, 170 in DeepSeek-V3 (`C` = `kv_lora_rank`, `M` =
/// `qk_nope_head_dim`, `V` = `v_head_dim`); but the non-absorbed form uses the tile product, which is several
/// times faster. The limit covers decode rows with the maximum number of draft tokens (16): draft tokens must
/// not change how a token is computed.
const ABSORBED_MAX_QUERY_LEN: usize = 17;

/// Arguments of one launch of MLA, which the absorbed and the non-absorbed form share.
struct CpuMlaArgs<'a, 'b> {
    args: &'a MlaAttentionArgs<'b>,
    layout: &'a MlaKvLayout,
    pool: *const u8,
    /// Number of query heads.
    heads: usize,
    /// Key channels without RoPE per head (`qk_nope_head_dim`).
    nope_dim: usize,
    /// Channels of a value per head (`v_head_dim`).
    value_dim: usize,
}

// SAFETY: the pool is only read while it is borrowed.
unsafe impl Sync for CpuMlaArgs<'_, '_> {}

impl CpuMlaArgs<'_, '_> {
    /// Number of channels of a query head.
    fn qk_head_dim(&self) -> usize {
        self.nope_dim + self.layout.rope_dim
    }

    /// Number of keys that the last token of a row attends to.
    fn context(&self, row: usize) -> usize {
        self.args.rows.context(row) - self.args.first_position
    }

    /// Returns the KV row of the `i`th position that attention reads: compressed KV, then the key channels
    /// with RoPE.
    fn row<T>(&self, table: &[i32], i: usize) -> &[T] {
        let (tokens, position) = (self.layout.block_tokens, i + self.args.first_position);
        let slot = table[position / tokens] as usize * tokens + position % tokens;
        let start = self.layout.row(self.args.layer, slot);
        // SAFETY: layer and blocks were checked, so the row is inside the pool; no thread writes the pool
        // during the call.
        unsafe { std::slice::from_raw_parts(self.pool.cast::<T>().add(start), self.layout.width()) }
    }
}

impl CpuKernel for MlaAttention<'_> {
    fn run(self, cpu: &CpuBackend) -> Result<(), DeviceError> {
        let Self { mut o, pool: kv, layout, args } = self;
        check(&o, kv, layout, args)?;
        let call = CpuMlaArgs {
            args,
            layout,
            pool: kv.as_ptr(),
            heads: args.heads.w_uk.len(),
            nope_dim: args.heads.w_uk.n(),
            value_dim: args.heads.w_uv.n(),
        };
        for row in (0..args.rows.len()).filter(|&row| args.rows.is_padding(row)) {
            let (from, to) = args.rows.tokens(row);
            for_float!(KERNEL, layout.dtype, T => {
                (from..to).for_each(|t| o.row_mut::<T>(t).fill(T::default()));
            });
        }
        let has_queries = |row: &usize| {
            let (from, to) = args.rows.tokens(*row);
            to > from && !args.rows.is_padding(*row)
        };
        let rows = (0..args.rows.len()).filter(has_queries);
        let (absorbed_rows, non_absorbed_rows): (Vec<usize>, Vec<usize>) =
            rows.partition(|&r| uses_absorbed_attention(args, r));
        for_float!(KERNEL, layout.dtype, T => {
            for row in non_absorbed_rows {
                cpu.attend_mla_non_absorbed::<T>(&mut o, &call, row)?;
            }
            if let Some(w_uk_t) = args.heads.w_uk_t {
                cpu.attend_mla_absorbed::<T>(&mut o, &call, w_uk_t, &absorbed_rows)?;
            }
        });
        Ok(())
    }
}

fn uses_absorbed_attention(args: &MlaAttentionArgs<'_>, row: usize) -> bool {
    let (from, to) = args.rows.tokens(row);
    args.heads.w_uk_t.is_some() && to - from <= ABSORBED_MAX_QUERY_LEN
}

fn check(
    o: &MatMut<'_>,
    kv: &Buffer,
    layout: &MlaKvLayout,
    args: &MlaAttentionArgs<'_>,
) -> Result<(), DeviceError> {
    args.check_shapes(o, layout)?;
    check_size(KERNEL, "pool bytes", kv.bytes().min(layout.bytes()), layout.bytes())?;
    if args.layer >= layout.layers {
        let (what, index, limit) = ("layer", args.layer as i64, layout.layers);
        return Err(DeviceError::Index { kernel: KERNEL, what, index, limit });
    }
    let keys = AttentionKeyRange { first_position: args.first_position, window: None };
    args.rows.check(args.q.rows(), layout.blocks, layout.block_tokens, keys)?;
    for row in (0..args.rows.len()).filter(|&row| !args.rows.is_padding(row)) {
        let (from, to) = args.rows.tokens(row);
        let first_query = args.rows.context(row) - (to - from);
        if to > from && first_query < args.first_position {
            let (what, index, limit) =
                ("first position", args.first_position as i64, first_query + 1);
            return Err(DeviceError::Index { kernel: KERNEL, what, index, limit });
        }
    }
    Ok(())
}
