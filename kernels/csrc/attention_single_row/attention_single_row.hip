// attention_single_row: o [tokens, query heads * D] = softmax(scale q Kᵀ) V for rows (requests of a step)
// with one query and a short context, fused with q/k norm, RoPE and the KV write: it reads the output of the
// QKV projection. D is the head dim. GQA and MHA; NVIDIA from sm_90 on, half_t. CPU reference:
// `QkNormRopeKvWrite`, then `PagedAttention`. The outputs of rows with context length 0 (padding) are zeros.
//
// A single row is bound by memory latency, not by bandwidth. Therefore the keys of a KV head are divided
// among the blocks of a cluster, which merge through distributed shared memory: a block merges the results of
// its warps in its own shared memory, and the first block merges those of the blocks in its shared memory.
// Rows with long contexts need more SMs than a cluster has; they use attention_decode with FROM_QKV, which
// writes the same bits to the pool. The splits of a row, and therefore its rounding, depend only on its
// context length.
//
// Context lengths, positions, block tables and all keys except that of the row's token are loaded before
// grid_wait(), while earlier kernels still run (programmatic dependent launch). Therefore another kernel,
// which calls grid_launch_dependents() after its own grid_wait(), must run between the kernel that wrote this
// data and this kernel: for contexts, positions and tables, written by `prepare`, it is the step's embedding
// or first norm; the keys were written in earlier steps.
//
//   pool     KV pool of this layer [block][KV head][K tile | V tile], tiles [BLOCK_TOKENS][D]
//   tables   block tables, i32 [sequence slots, table_width]; row r reads table table_rows[r], or table r if
//            table_rows is null
//
//   window, sinks  as in attention/key_range.h; with -DWINDOWED=1 and -DSINKS=1 only. The keys that are divided among
//            blocks begin at the tile that has the first key of the window; nothing before it is read.
//
//   -DHEAD_DIM=64|128  -DBLOCK_TOKENS=n (a multiple of 16)  -DHEAD_GROUP=1..8 query heads per KV head
//   -DTEAM_WARPS=4|8 warps per block  -DSTAGES=n pipeline stages (tiles) of a warp's ring in shared memory
//   -DEARLY_LAUNCH=1 calls grid_launch_dependents() at the start: faster if the next kernel's shared memory fits
//   next to this one's
// Grid: a cluster of BLOCKS blocks per row and KV head. Block: TEAM_WARPS warps of 32 lanes.
// Dynamic shared memory: BARRIER_BYTES + (BLOCKS + TEAM_WARPS) HEAD_GROUP RECORD 4 + RING_BYTES.
//
// Rounding: probabilities to half_t; the output once. Roofline: 4 context D bytes per row and KV head.
#include "dev.h"
#include "attention/key_range.h"

#define KV_FP8 0
#define KEYS_FIRST 1
#define LATE_VALUES 0
#define FIRST_POSITION 0
#ifndef EARLY_LAUNCH
#  define EARLY_LAUNCH 0
#endif
#include "attention_decode/keys_first.h"
#include "dev/cluster.h"

enum : u32 {
    BLOCKS = 8,  // blocks per cluster: the portable maximum
    WARPS = TEAM_WARPS,
    TEAM = WARPS * WARP_SIZE,
    TILES_AHEAD = STAGES,
    BARRIER_BYTES = 128
};

#include "attention_decode/merge_records.h"
#include "attention_decode/ring.h"
#include "attention_single_row/share.h"
#include "attention_decode/mask_first_keys.h"
#include "attention_decode/from_projections.h"
#include "attention_single_row/merge_cluster.h"

// Computes the attention of this warp over its part of the keys of the block, and writes the partial result
// (outputs, maximum and sum per query) to `record`.
DEV void attend(const QueryKeySource& source, const SplitCursor& p, KvTileRing& ring, TileCursor& tiles, float* record,
                float factor) {
    QueryOperand mine{};
    begin_split(source, mine, p, true);
    SoftmaxState r;
    start(r);
    for (u32 at = p.first + warp_id() * TILE_KEYS; at < p.end; at += WARPS * TILE_KEYS) {
        KeyOperand k;
        ValueOperand v;
        await_tile();
        complete_tile(source, ring, p, at);
        load_tile(ring, p.end - at, k, v);
        fetch_next(ring, tiles);
        ScoreFragment s = score(mine, k);
#if WINDOWED
        if (at == origin_of(p)) mask_first_keys(s.v, p, p.window);
#endif
        const u32 seen[SLOTS] = {p.end - at, p.end - at};
        online_softmax(r, s, seen, factor);
        add_values(r, s, v);
    }
    finish(r);
    put(r, record);
}

// Arguments whose names end in `stride` are in elements.
KERNEL(TEAM)
attention_single_row(half_t* o, KV* pool, const half_t* qkv, const half_t* q_norm, const half_t* k_norm, const float* cos,
                     const float* sin, const i32* positions, const i64* slots, const i32* cu_q, const i32* context_lens,
                     const i32* tables, const i32* table_rows, u32 kv_heads, u32 table_width, u32 qkv_stride, u32 o_stride,
                     float factor, float eps KEY_RANGE_PARAMS) {
    const SplitCursor p =
        cursor_of_block(BatchMetadata{context_lens, cu_q, tables, table_rows, positions, kv_heads, table_width WINDOW_VALUE});
    half_t* const out = o + (u64)p.token * o_stride + p.head * HEAD_GROUP * D;
    if (p.context == 0) {
        grid_wait();
        if (p.rank == 0)
            for (u32 i = tid(); i < HEAD_GROUP * D; i += TEAM) out[i] = to_half(0.f);
        return;
    }
    const SharedMemoryLayout s = shared_layout();
    if (tid() == 0) {
        barrier_init(s.records_full, 1);
        barriers_ready();
        if (p.rank == 0) barrier_expect(s.records_full, p.splits * SENT_BYTES);
    }
    sync();
    cluster_arrive<BLOCKS>();
    if (p.rank >= p.splits) return;
    if (EARLY_LAUNCH) grid_launch_dependents();
    KvTileRing ring = ring_of_warp(s.rings);
    TileCursor tiles = tiles_of_warp(p, pool, kv_heads);
    UNROLL for (u32 i = 0; i < TILES_AHEAD; ++i) fetch_next(ring, tiles);
    grid_wait();
    if (!EARLY_LAUNCH) grid_launch_dependents();
    const QueryKeySource source{qkv, q_norm, k_norm, cos, sin, slots, pool, kv_heads, qkv_stride, eps};
    attend(source, p, ring, tiles, s.records + warp_id() * HEAD_GROUP * RECORD, factor);
    sync();
    cluster_wait<BLOCKS>();
    send_records(s, p);
    if (p.rank == 0) finish_cluster(s, p, out SINKS_VALUE);
}
EXPORT(attention_single_row)
