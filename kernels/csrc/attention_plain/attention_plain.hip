// attention_plain: o [tokens, query heads * D] = softmax(scale q Kᵀ) V, causal (GQA and MHA); D is the head
// dim. Reference kernel for shapes that the tiled kernels do not support: f32 queries, any head dim up to
// 512, any KV block size. One warp per query and head; a lane computes the score of one key, then accumulates
// CHANNELS channels of the values. Not optimised. CPU reference: `PagedAttention`.
//
// Positions are processed WARP_SIZE at a time, beginning at position 0, so that the result of a query depends
// only on the keys that it attends to. The outputs of rows with context length 0 (padding) are zeros.
// Arguments are those of attention_prefill, plus `rows`, the number of rows of the step; `window`, the maximum
// number of keys that a query attends to; `first_position`, the first position that queries attend to; and
// `sinks` [query heads] (or null). Table entries and keys before the first key of a query are not read.
//
//   -DACT_F32=0|1 (queries and outputs)  -DHEAD_DIM=n  -DBLOCK_TOKENS=n  -DKV_FP8=1 (KV pool; default: type
//                           of the queries)
// Grid: (tokens, query heads). Block: WARP_SIZE.
// Rounding: probabilities to the type of the queries, before their sum; the output once.
#include "dev.h"
#include "attention/key_range.h"
#include "attention/row_of.h"

#if KV_FP8
typedef fp8 KV;
#else
typedef ACT KV;
#endif

enum : u32 { D = HEAD_DIM, CHANNELS = (D + WARP_SIZE - 1) / WARP_SIZE };

KERNEL(WARP_SIZE) attention_plain(ACT* o, const ACT* q, const KV* pool, const i32* cu_q, const i32* context_lens,
                                  const i32* tables, const i32* table_rows, u32 rows, u32 group, u32 kv_heads,
                                  u32 table_width, u32 window, u32 first_position, const float* sinks,
                                  u32 q_stride, u32 o_stride, float factor) {
    SHARED(float, query, D);
    grid_wait();
    const u32 head = bid_y(), token = bid_x(), kv_head = head / group, row = row_of(cu_q, rows, token);
    const u32 seen = keys_seen(cu_q, context_lens, row, token);
    const i32* table = tables + (u64)(table_rows ? (u32)table_rows[row] : row) * table_width;
    for (u32 d = lane(); d < D; d += WARP_SIZE) query[d] = f32(q[(u64)token * q_stride + head * D + d]) * factor;
    sync();

    float max = -1e30f, sum = 0.f, out[CHANNELS];
    for (u32 c = 0; c < CHANNELS; ++c) out[c] = 0.f;
    const u32 begin = first_key_of(seen, window, first_position);
    for (u32 at = begin / WARP_SIZE * WARP_SIZE; at < seen; at += WARP_SIZE) {
        const u32 position = at + lane(), keys = seen - at < WARP_SIZE ? seen - at : WARP_SIZE;
        const bool present = position < seen && position >= begin;
        const u64 block = present ? (u64)(u32)table[position / BLOCK_TOKENS] * kv_heads + kv_head : 0;
        const u64 key = block * 2 * BLOCK_TOKENS * D + position % BLOCK_TOKENS * D;
        float s = 0.f;
        for (u32 d = 0; d < D; ++d) s = fma_(query[d], present ? f32(pool[key + d]) : 0.f, s);
        if (!present) s = -1e30f;
        const float new_max = fmax_(max, warp_max(s)), rescale = exp2_(max - new_max);
        const float p = present ? f32(to<ACT>(exp2_(s - new_max))) : 0.f;
        max = new_max;
        sum = fma_(sum, rescale, warp_sum(p));
        for (u32 c = 0; c < CHANNELS; ++c) out[c] *= rescale;
        for (u32 j = at < begin ? begin - at : 0; j < keys; ++j) {
            const float weight = shfl(p, j);
            const u64 value = shfl(key, j) + BLOCK_TOKENS * D;
            for (u32 c = 0; c < CHANNELS; ++c) {
                const u32 d = c * WARP_SIZE + lane();
                if (d < D) out[c] = fma_(weight, f32(pool[value + d]), out[c]);
            }
        }
    }
    const float scale = seen ? 1.f / with_sink(sum, max, sinks, head) : 0.f;
    for (u32 c = 0; c < CHANNELS; ++c) {
        const u32 d = c * WARP_SIZE + lane();
        if (d < D) o[(u64)token * o_stride + head * D + d] = to<ACT>(out[c] * scale);
    }
}
EXPORT(attention_plain)
