// mla_plain: absorbed MLA of any shape, reference kernel. A block absorbs the query of one token and head
// with W_UK, reads every row of the pool once for scores and values, and multiplies the weighted average by
// W_UV. Not optimised: each block reads the whole matrices of its head. CPU reference: cpu/mla.
//
// o [tokens, heads * VALUE]; q [tokens, heads * (QK_NOPE_HEAD_DIM + QK_ROPE_HEAD_DIM)], with RoPE applied;
// pool: one layer, [slot][KV_LORA_RANK + QK_ROPE_HEAD_DIM]; key (W_UK)
// [heads][QK_NOPE_HEAD_DIM][KV_LORA_RANK], value (W_UV) [heads][VALUE][KV_LORA_RANK], all of ACT. Rows as in
// attention_plain. Positions are processed KEYS at a time, beginning at position 0, so that the result of a
// query depends only on the keys that it attends to. The outputs of rows with context length 0 (padding) are
// zeros. The first `masked_keys` positions are masked; no query is at one of these positions.
//
//   -DACT_F32=0|1  -DKV_LORA_RANK=n -DQK_ROPE_HEAD_DIM=n -DQK_NOPE_HEAD_DIM=n -DVALUE=n (even; KV_LORA_RANK at
//   most 1024)  -DBLOCK_TOKENS=n
// Grid: (tokens, heads). Block: 256.
// Rounding: the output only; all sums are f32.
#include "dev.h"
#include "attention/row_of.h"

enum : u32 { WIDTH = KV_LORA_RANK + QK_ROPE_HEAD_DIM, QUERY = QK_NOPE_HEAD_DIM + QK_ROPE_HEAD_DIM,
             THREADS = 256, KEYS = 64,
             OWN = (KV_LORA_RANK + THREADS - 1) / THREADS };

// Computes the absorbed query of one head, query [KV_LORA_RANK + QK_ROPE_HEAD_DIM] = factor * [W_UKᵀ q_nope |
// q_rope], where w = W_UK [QK_NOPE_HEAD_DIM, KV_LORA_RANK].
DEV void absorb_query(float* query, const ACT* q, const ACT* w, float factor) {
    for (u32 c = tid(); c < KV_LORA_RANK; c += THREADS) {
        float sum = 0.f;
        for (u32 m = 0; m < QK_NOPE_HEAD_DIM; ++m) sum = fma_(f32(w[m * KV_LORA_RANK + c]), f32(q[m]), sum);
        query[c] = sum * factor;
    }
    for (u32 i = tid(); i < QK_ROPE_HEAD_DIM; i += THREADS)
        query[KV_LORA_RANK + i] = f32(q[QK_NOPE_HEAD_DIM + i]) * factor;
    sync();
}

// Computes the output of one head, y [VALUE] = W_UV x, where w = W_UV [VALUE, KV_LORA_RANK]; each output is
// computed by one warp.
DEV void project_values(ACT* y, const float* x, const ACT* w) {
    for (u32 v = warp_id(); v < VALUE; v += THREADS / WARP_SIZE) {
        float sum = 0.f;
        for (u32 c = lane(); c < KV_LORA_RANK; c += WARP_SIZE) sum = fma_(f32(w[(u64)v * KV_LORA_RANK + c]), x[c], sum);
        sum = warp_sum(sum);
        if (lane() == 0) y[v] = to<ACT>(sum);
    }
}

KERNEL(256) mla_plain(ACT* o, const ACT* q, const ACT* pool, const ACT* key, const ACT* value, const i32* cu_q,
                      const i32* context_lens, const i32* tables, const i32* table_rows, u32 rows, u32 table_width,
                      u32 q_stride, u32 o_stride, u32 masked_keys, float factor) {
    SHARED(float, query, WIDTH);
    SHARED(float, scores, KEYS);
    grid_wait();
    const u32 head = bid_y(), token = bid_x(), row = row_of(cu_q, rows, token);
    const u32 seen = keys_seen(cu_q, context_lens, row, token);
    const i32* table = tables + (u64)(table_rows ? (u32)table_rows[row] : row) * table_width;
    const auto at = [&](u32 position) {
        const u64 block = (u32)table[position / BLOCK_TOKENS];
        return pool + (block * BLOCK_TOKENS + position % BLOCK_TOKENS) * WIDTH;
    };
    absorb_query(query, q + (u64)token * q_stride + head * QUERY,
                 key + (u64)head * QK_NOPE_HEAD_DIM * KV_LORA_RANK, factor);

    float max = -1e30f, sum = 0.f, mean[OWN];
    for (u32 i = 0; i < OWN; ++i) mean[i] = 0.f;
    for (u32 first = 0; first < seen; first += KEYS) {
        const u32 keys = seen - first < KEYS ? seen - first : KEYS;
        for (u32 j = warp_id(); j < KEYS; j += THREADS / WARP_SIZE) {
            float s = 0.f;
            if (j < keys) {
                const ACT* compressed_kv = at(first + j);
                for (u32 d = lane(); d < WIDTH; d += WARP_SIZE) s = fma_(query[d], f32(compressed_kv[d]), s);
            }
            s = warp_sum(s);
            if (lane() == 0) scores[j] = j < keys && first + j >= masked_keys ? s : -1e30f;
        }
        sync();
        float new_max = max;
        for (u32 j = 0; j < keys; ++j) new_max = fmax_(new_max, scores[j]);
        const float rescale = exp2_(max - new_max);
        max = new_max;
        sum *= rescale;
        for (u32 i = 0; i < OWN; ++i) mean[i] *= rescale;
        for (u32 j = 0; j < keys; ++j) {
            const float p = exp2_(scores[j] - max);
            const ACT* compressed_kv = at(first + j);
            sum += p;
            for (u32 i = 0; i < OWN; ++i) {
                const u32 c = i * THREADS + tid();
                if (c < KV_LORA_RANK) mean[i] = fma_(p, f32(compressed_kv[c]), mean[i]);
            }
        }
        sync();  // The scores of the next keys overwrite `scores`.
    }
    const float scale = seen ? 1.f / sum : 0.f;
    for (u32 i = 0; i < OWN; ++i) {
        const u32 c = i * THREADS + tid();
        if (c < KV_LORA_RANK) query[c] = mean[i] * scale;
    }
    sync();
    project_values(o + (u64)token * o_stride + head * VALUE, query, value + (u64)head * VALUE * KV_LORA_RANK);
}
EXPORT(mla_plain)
