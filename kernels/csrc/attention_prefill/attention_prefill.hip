// attention_prefill: o [tokens, query heads * D] = softmax(scale q Kᵀ) V, causal, for rows (requests of a
// step) with any number of queries, over the paged KV pool (prefill flash attention, GQA and MHA); D is the
// head dim.
// CPU reference: `PagedAttention`.
//
// The (query, head) pairs of a row and KV head are numbered token by token and cut into tiles; the pairs of a
// tile share every key that is loaded. Keys are processed from position 0 upwards in steps at fixed
// positions: a query's result depends only on the keys that it attends to. Tiles with the most keys are
// scheduled first.
//
//   pool, tables, table_rows   as in attention_decode
//   pool_map                   used with WGMMA and a half_t pool: TMA descriptor of the layer's pool as a
//                           matrix of D columns, with boxes of 16 rows
//   first_row, rows            first row, and number of rows, of this launch; earlier rows belong to other
//                           launches
//   window, sinks  as in attention/key_range.h; with -DWINDOWED=1 and -DSINKS=1 only. A tile begins at the step that has
//               the first key of its first token: table entries, keys and values before that key are not read.
//   kv_heads    number of KV heads, multiplied by KV_SHARERS
//   work_counter               counter of work items (tiles) from which blocks draw; zero before and after
//                              the launch
//
//   -DWGMMA=1  WGMMA by warpgroups (warpgroups.h), NVIDIA from sm_90 on: tiles of 128 pairs, steps of 128
//               keys (64 with HEAD_DIM=256; 64 pairs, 32 keys with HEAD_DIM=512).
//               Grid: at most the number of SMs; persistent blocks take tiles until none is left. Block: 384.
//               Dynamic shared memory: GROUPS_SHARED bytes.
//   -DWGMMA=0  MMA by warps (warps.h), every target: tiles of 16 pairs per warp, steps of 16 keys, copied STEP
//               at a time.
//               Grid: (tiles of the longest row: pairs / (16 * warps / CHANNEL_WARPS), KV heads, rows). Block: a multiple
//               of WARP_SIZE, at most 256; 256 with warps of 64 lanes.
//               Dynamic shared memory: STAGES * STEP * (K_STRIDE + V_STRIDE) elements of the pool.
//   -DSTAGES=1|2 pipeline stages in shared memory (with -DWGMMA=0); 1 with warps of 64 lanes, which hold the
//   next step in registers (register_copy.h)
//   -DHEAD_DIM=64|128|256|512 (512 not with -DWGMMA=1 -DKV_FP8=1)  -DBLOCK_TOKENS=n (a multiple of 16)  -DKV_FP8=0|1
//   -DHEAD_GROUP=n query heads per tile  -DKV_SHARERS=n number of tiles that share a KV head: it has KV_SHARERS *
//   HEAD_GROUP query heads
//
// Rounding: probabilities to half_t; the output once. Roofline: 4 D operations per pair and key attended to.
#include "dev.h"
#include "dev/tensor_map.h"
#include "attention/key_range.h"
#include "attention/warp.h"

#ifndef KV_SHARERS
#  define KV_SHARERS 1
#endif

struct PrefillParams {
    half_t* o;
    u32* work_counter;
    const half_t* q;
    const KV* pool;
    const TensorMap* pool_map;
    const i32 *cu_q, *context_lens, *tables, *table_rows;
    u32 first_row, rows, kv_heads, table_width, q_stride, o_stride;
    float factor;
#if WINDOWED
    u32 window;
#endif
#if SINKS
    const float* sinks;
#endif
};

// Returns the first key of a query that has `seen` keys up to its own position.
#if WINDOWED
DEV u32 first_key_of(const PrefillParams& job, u32 seen) { return first_key_of(seen, job.window, 0); }
#endif
// Returns the sum of probabilities of a query of query head `head`, with the sink of the head. `max`: in units of
// log2(e).
#if SINKS
DEV float denominator(const PrefillParams& job, float sum, float max, u32 head) {
    return with_sink(sum, max, job.sinks, head);
}
#else
DEV float denominator(const PrefillParams&, float sum, float, u32) { return sum; }
#endif

DEV const i32* table_of(const PrefillParams& job, u32 row) {
    return job.tables + (u64)(job.table_rows ? (u32)job.table_rows[row] : row) * job.table_width;
}

#if WGMMA
#  include "attention_prefill/warpgroups.h"
#  define PREFILL KERNEL_ALONE(384)
#else
#  include "attention_prefill/warps.h"
#  define PREFILL KERNEL(256)
#endif

PREFILL attention_prefill(half_t* o, u32* work_counter, const half_t* q, const KV* pool, TENSOR_MAP pool_map, const i32* cu_q,
                          const i32* context_lens, const i32* tables, const i32* table_rows, u32 first_row, u32 rows,
                          u32 kv_heads, u32 table_width, u32 q_stride, u32 o_stride, float factor KEY_RANGE_PARAMS) {
    prefill(PrefillParams{o, work_counter, q, pool, &pool_map, cu_q, context_lens, tables, table_rows, first_row, rows,
                          kv_heads, table_width, q_stride, o_stride, factor WINDOW_VALUE SINKS_VALUE});
}
EXPORT(attention_prefill)
