// attention_decode: o [tokens, query heads * D] = softmax(scale q Kᵀ) V for rows (requests of a step) with
// one query, over the paged KV pool (GQA, split-KV flash decoding); D is the head dim. CPU reference:
// `PagedAttention`. The outputs of rows with context length 0 (padding) are zeros.
//
// The queries of a KV head share every key they load. Up to TOKENS_PER_BLOCK successive tokens of a request
// with equal splits (split_schedule.h) share the keys as well; each token uses the scores of the keys that it
// attends to. A context is cut into splits of at most split_keys(context) keys, and a block processes a
// contiguous, equal part of the list of all splits (split_schedule.h, run_splits.h). The warps of the block
// process tiles of 16 keys in turn; tiles are prefetched across splits, heads and rows (ring.h). The partial
// results of the warps are merged in shared memory in ascending order of warps. The splits of a head are
// merged by the block that finishes last, in an order that depends only on the number of splits
// (merge_records.h). The splits of a row depend only on its context length, and the grid size only determines
// which block processes which split. Therefore the result of a row is bit-identical in any batch (with the
// same compiled variant) and for any grid size, captured or eager.
//
// Context lengths, block tables and all keys, except tiles with tokens of this step, are loaded before
// grid_wait(), while earlier kernels still run (programmatic dependent launch). Therefore another kernel,
// which calls grid_launch_dependents() after its own grid_wait(), must run between the kernel that wrote this
// data and this kernel: for contexts and tables, written by `prepare`, it is the step's embedding or first
// norm; the keys were written in earlier steps.
//
//   pool     KV pool of this layer [block][KV head][K tile | V tile], tiles [BLOCK_TOKENS][D]
//   tables   block tables, i32 [sequence slots, table_width]; row r reads table table_rows[r], or table r if
//            table_rows is null
//   partial  f32 [rows, KV heads, max_splits, HEAD_GROUP, RECORD]: outputs, then maximum and sum; need not be
//            initialised
//   arrived  u32 [rows, KV heads], zero before and after the launch
//   max_splits  at least the number of splits of any row
//   kv_heads    number of KV heads, multiplied by KV_SHARERS
//   window, sinks  as in attention/key_range.h; with -DWINDOWED=1 and -DSINKS=1 only. Splits are counted from the tile
//            that has the first key of the window: table entries, keys and values before it are not read.
//
//   -DHEAD_DIM=64|128|256|512  -DBLOCK_TOKENS=n (a multiple of 16)  -DKV_FP8=0|1
//   -DHEAD_GROUP=1..16 query heads per block; at most 8 with HEAD_DIM=512, or 256 and warps of 32 lanes
//   -DKV_SHARERS=n number of blocks that share a KV head: it has KV_SHARERS * HEAD_GROUP query heads
//   -DSTAGES=n pipeline stages (tiles) of a warp's ring in shared memory; warps of 64 lanes have no ring
//   -DSMALL_BATCH=1 smaller splits, for small batches; -DSPLIT_DIVISOR=2 halves their number of keys, on GPUs with
//   twice the compute units of an H200
//   -DTOKENS_PER_BLOCK=n tokens of a request per block, at most 16 / HEAD_GROUP. Argument `max_new_tokens`: maximum
//   number of tokens of a request in the step
//   -DFIRST_POSITION=n masks keys at positions below n (n at most 16): for an MTP module, which has no state of
//   the first token
//   -DFROM_QKV=1 fuses q/k norm, RoPE and the KV write: q, k, v are the output of the QKV projection
//   (from_projections.h); warps of 32 lanes, HEAD_GROUP at most 8, half_t
// Grid: any number of blocks; it is fastest with as many blocks as are resident at a time. Block: WARPS
// warps. Dynamic shared memory: RING_BYTES + SETS * SET * 4 bytes.
//
// Rounding: probabilities to half_t; the output once. Roofline: 2 context D bytes per row and KV head with
// fp8, twice that with half_t.
#include "dev.h"
#include "attention/key_range.h"

#ifndef KV_FP8
#  define KV_FP8 0
#endif
#ifndef SMALL_BATCH
#  define SMALL_BATCH 0
#endif
#ifndef SPLIT_DIVISOR
#  define SPLIT_DIVISOR 1
#endif
#ifndef FIRST_POSITION
#  define FIRST_POSITION 0
#endif
#ifndef FROM_QKV
#  define FROM_QKV 0
#endif
#ifndef KV_SHARERS
#  define KV_SHARERS 1
#endif
#ifndef TOKENS_PER_BLOCK
#  define TOKENS_PER_BLOCK 1
#endif
// With at most 8 queries per block and warps of 32 lanes, keys instead of queries are the rows (M) of the
// MMA, so that no MMA rows are unused (keys_first.h).
#define KEYS_FIRST (WARP_SIZE == 32 && HEAD_GROUP * TOKENS_PER_BLOCK <= 8)
// With heads of 256 or more channels a lane has no registers for the values of a tile in addition to its keys: values are
// loaded while they are multiplied.
#define LATE_VALUES (KEYS_FIRST && HEAD_DIM >= 256)
#if KEYS_FIRST
#  include "attention_decode/keys_first.h"
#else
#  include "attention/warp.h"
// Whether this lane stores the softmax maximum and sum of its queries: true on one lane per query.
DEV bool is_query_leader() { return strip_k() == 0; }
// Calls put(query, channel, value) for each attention output that this lane has in registers.
template <class Put> DEV void each_output(const SoftmaxState& r, const Put& put) {
    UNROLL for (u32 p = 0; p < PARTS; ++p)
        UNROLL for (u32 j = 0; j < PART; ++j) put(query_of(part_slot(p)), part_channel(p) + j, PART_VALUE(r.out, p, j));
}
#endif

#ifndef STAGES
#  define STAGES 3
#endif
enum : u32 {
    WARPS = HEAD_DIM > 256 ? 2 : 4,  // with heads of 512 channels shared memory holds the tiles and records of two warps
    TEAM = WARPS * WARP_SIZE,
    ITERATION_KEYS = WARPS * TILE_KEYS,  // keys per block iteration: one tile per warp
    TILES_AHEAD = WARP_SIZE == 64 ? 1 : STAGES,
    MAX_SEPARATE_SPLITS = 1,  // rows are scheduled separately up to this number of splits per block
    MIN_SPLIT_KEYS = 128,
    GROUP_SPLIT_LENGTH = 0  // the split length of a row depends on its own context only
};
DEV void team_sync() { sync(); }

// Returns the maximum number of keys per split for a context length. Small batches use short splits for short
// contexts, to occupy all SMs; a single row (FROM_QKV) uses even shorter splits, because no other row
// competes for memory bandwidth. In large batches, finishing a split takes about 2 us while memory is busy,
// which costs more than the better load balance of short splits gains. Long contexts use long splits, to keep
// merging cheap; heads of 512 channels, whose partial results are larger, use longer ones. Must equal `SPLITS`,
// `SMALL_BATCH_SPLITS`, `LARGE_HEAD_SMALL_BATCH_SPLITS` and `SINGLE_ROW_SPLITS` in kernels/src/gpu/attention_splits.rs.
DEV u32 measured_split_keys(u32 context) {
    if (SMALL_BATCH && HEAD_DIM > 256)
        return context <= 2048 ? 128 : context <= 8192 ? 512 : context <= 32768 ? 1024 : 4096;
    const u32 finest = FROM_QKV && context <= 2048 ? 128 : FROM_QKV || SMALL_BATCH ? 256 : 448;
    return context <= 8192 ? finest : context <= 32768 ? 512 : 1024;
}
// Number of keys per split: the measured number divided by SPLIT_DIVISOR, at least MIN_SPLIT_KEYS.
DEV u32 split_keys(u32 context) {
    const u32 keys = measured_split_keys(context) / SPLIT_DIVISOR;
    return keys < MIN_SPLIT_KEYS ? (u32)MIN_SPLIT_KEYS : keys;
}
DEV u32 splits_of_keys(u32 context, u32) {
    const u32 keys = split_keys(context);
    return (context + keys - 1) / keys;
}
// Returns the number of keys per split if a context is cut into `splits` splits. In large batches all splits
// of a context except the last have equal length, because blocks get equal numbers of splits and must have
// equal work.
DEV u32 even_split(u32 context, u32 splits) {
    if (FROM_QKV || SMALL_BATCH) return split_keys(context);
    return ((context + splits - 1) / splits + ITERATION_KEYS - 1) / ITERATION_KEYS * ITERATION_KEYS;
}

#include "attention_decode/split_schedule.h"
#include "attention_decode/last_block.h"
#include "attention_decode/ring.h"
#include "attention_decode/merge_records.h"
#if FROM_QKV
#  include "attention_decode/from_projections.h"
#else
#  include "attention_decode/from_memory.h"
#endif
#include "attention_decode/run_splits.h"

// Windows and sinks need more registers than three resident blocks have; ptxas 13.0 would spill. Two blocks are resident.
#if DEV_NV && (WINDOWED || SINKS)
#  define DECODE_KERNEL extern "C" __global__ __launch_bounds__(TEAM, 2) void
#else
#  define DECODE_KERNEL KERNEL(TEAM)
#endif

// Arguments whose names end in `stride` are in elements.
#if FROM_QKV
DECODE_KERNEL
attention_decode(half_t* o, KV* pool, float* partial, u32* arrived, const half_t* qkv, const half_t* q_norm,
                 const half_t* k_norm, const float* cos, const float* sin, const i32* positions, const i64* slots,
                 const i32* cu_q, const i32* context_lens, const i32* tables, const i32* table_rows, u32 row_count,
                 u32 kv_heads, u32 table_width, u32 max_splits, u32 qkv_stride, u32 o_stride, float factor, float eps
                 KEY_RANGE_PARAMS) {
    const u32 max_new_tokens = 1;
    const QueryKeySource source{qkv, q_norm, k_norm, cos, sin, slots, pool, kv_heads, qkv_stride, eps};
#else
DECODE_KERNEL
attention_decode(half_t* o, float* partial, u32* arrived, const half_t* q, const KV* pool, const i32* cu_q,
                 const i32* context_lens, const i32* tables, const i32* table_rows, u32 row_count, u32 kv_heads,
                 u32 table_width, u32 max_splits, u32 max_new_tokens, u32 q_stride, u32 o_stride, float factor
                 KEY_RANGE_PARAMS) {
    const i32* positions = nullptr;
    const QueryKeySource source{q, q_stride};
#endif
    DYN_SHARED(u8, shared);
    const BatchMetadata rows{context_lens, cu_q, tables, table_rows, row_count, kv_heads, table_width, positions,
                             TOKENS_PER_BLOCK, max_new_tokens WINDOW_VALUE};
    SplitRunState run = begin_run(start_of_block(rows), rows, (KV*)shared, pool);
    grid_wait();
    grid_launch_dependents();
    finish_run(run, source, rows, pool, (float*)(shared + RING_BYTES),
               DecodeOutputs{o, partial, arrived, max_splits, o_stride, kv_heads SINKS_VALUE}, factor);
}
EXPORT(attention_decode)
