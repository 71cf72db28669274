// gdn_chunk.hip - gated delta rule (gdn/gdn.hip) of rows of many tokens, in chunks of 64 tokens (Yang et al., 2024, arXiv
// 2412.06464). CPU reference: cpu/recurrent.rs.
//
// With G(i) the sum of the logarithms of the decay up to and with token i of a chunk, and s the state before the chunk:
//   (I + A) delta = diag(beta) (V - e^G K s)         A = tril(diag(beta) K K^T * e^(G(i) - G(j)), -1)
//   O = e^G Q s + tril(Q K^T * e^(G(i) - G(j))) delta
//   s = e^G(last) s + (e^(G(last) - G) K)^T delta
// gdn_chunk_prepare  (I + A)^-1 diag(beta), the scores of O, and the decay factors of each chunk and value head
// gdn_chunk_walk     deltas, outputs and state of each row, chunk by chunk
//   records: ChunkRecord [at least tokens / 64 + rows, value_heads]; other parameters: gdn/gdn.hip. Chunks begin at the first
//   token of a row. Rows of at most RECURRENT_TOKENS tokens, and padding, are left to gdn_delta_rule.
// Grid: gdn_chunk_prepare: (tokens / 64 + rows) x value_heads. gdn_chunk_walk: value_heads * value_dim / (16 * COLUMN_WARPS) x
// lanes; lane y of the grid takes every lanes-th row of many tokens.
// Rounding: products of 16-bit operands, sums in f32. The inverse and the state are f32; the state before a chunk, V - e^G K s,
// delta, the inverse and the scores are rounded for a product. Exponents of 2 are of differences that are at most 0.
// Roofline: one row: latency of the products of a chunk that follow one another, 74 MMAs of 16x16x16 per warp. Many rows: the
// 16-bit matrix rate.
#include "dev.h"
#include "gdn_chunk/prepare.h"
#include "gdn_chunk/walk.h"

KERNEL(PREPARE_THREADS)
gdn_chunk_prepare(u8* records, const half_t* qkv, const half_t* beta, const half_t* decay, const float* a_log, const float* dt_bias,
                  const i32* cu_q, u32 rows, u32 key_heads, u32 value_heads, u32 qkv_stride, u32 beta_stride, u32 decay_stride) {
    SHARED(PrepareShared, shared, 1);
    grid_wait();
    grid_launch_dependents();
    PrepareShared& s = shared[0];
    const u32 head = bid_y(), key_head = head / (value_heads / key_heads), key_channels = key_heads * KEY_DIM;
    const ChunkTokens chunk = chunk_of_record(cu_q, rows, bid_x());
    if (chunk.tokens == 0) return;
    const half_t* q = qkv + (u64)chunk.first * qkv_stride + key_head * KEY_DIM;
    copy_rows(s.k.rows, q + key_channels, qkv_stride, chunk.tokens);
    copy_rows(s.q.rows, q, qkv_stride, chunk.tokens);
    if (warp_id() == 0)
        token_gates(s.tokens, beta + (u64)chunk.first * beta_stride + head, decay + (u64)chunk.first * decay_stride + head,
                    beta_stride, decay_stride, decay_rate(a_log[head]), dt_bias[head], chunk.tokens);
    cp_async_commit();
    cp_async_wait<0>();
    wait_shared();
    sync();
    const WarpPairs pairs = warp_pairs();
    const PairSums sums = pair_products(s, pairs);
    token_norms(s);
    wait_shared();
    sync();
    ChunkRecord& record = ((ChunkRecord*)records)[(u64)bid_x() * value_heads + head];
    UNROLL for (u32 n = 0; n < OWN_PAIRS; ++n) store_pair(s, record, pairs, n, sums.v[n]);
    store_factors(record, s.tokens);
    wait_shared();
    sync();
    invert(s.q.matrix, s.k.matrix);
    store_inverse(record, s);
}
EXPORT(gdn_chunk_prepare)

// Whether `row` has many tokens.
DEV bool is_long(const i32* cu_q, u32 row, u32 rows) {
    return row < rows && (u32)(cu_q[row + 1] - cu_q[row]) > RECURRENT_TOKENS;
}

KERNEL(WALK_THREADS)
gdn_chunk_walk(half_t* o, const u8* records, const half_t* qkv, float* states, const i32* cu_q, const i32* read, const i32* write,
               u32 rows, u32 key_heads, u32 value_heads, u32 value_dim, u32 o_stride, u32 qkv_stride, u64 slot_stride) {
    DYN_SHARED(WalkShared, shared);
    grid_wait();
    grid_launch_dependents();
    const WalkParams params = {o, (const ChunkRecord*)records, qkv, states, cu_q, read, write, key_heads, value_heads, value_dim,
                               o_stride, qkv_stride, slot_stride};
    const u32 slices = value_dim / COLUMNS;
    const WarpColumns columns = {bid_x() / slices, bid_x() % slices * COLUMNS, warp_id() % COLUMN_WARPS, warp_id() < COLUMN_WARPS};
    u32 seen = 0;
    for (u32 base = 0; base < rows; base += WARP_SIZE) {
        const u64 bits = warp_ballot(is_long(cu_q, base + lane(), rows));
        for (u32 i = 0; i < WARP_SIZE && bits >> i != 0; ++i)
            if (bits >> i & 1 && seen++ % gdim_y() == bid_y()) walk_row(*shared, params, columns, base + i);
    }
}
EXPORT(gdn_chunk_walk)
