// attention_prefill/warps.h - prefill by warps: each warp (two warps with heads of 512 channels and warps of 32 lanes,
// see CHANNEL_WARPS in attention/warp.h) has a tile of 16 (query, head) pairs, the warps of a block have consecutive
// tiles. Keys and values are copied to shared memory in steps of STEP keys; a step is copied while the previous step is
// multiplied.
#pragma once

#ifndef STAGES
#  define STAGES 2
#endif

enum : u32 {
    STEP = D <= 128 ? 64 : D == 256 || WARP_SIZE == 32 ? 32 : 16,  // keys per copy step
    K_STRIDE = D + KEY_PADDING,      // row strides in shared memory, in elements
    V_STRIDE = D + VALUE_PADDING,
    STAGE = STEP * (K_STRIDE + V_STRIDE)
};

// Location of the keys and values of one row and KV head.
struct RowKvSource {
    const i32* table;
    u32 kv_heads, head, context;
#if WINDOWED
    u32 first_key;  // first key that the queries of the block attend to
#endif
};
#if WINDOWED
DEV u32 first_key(const RowKvSource& row) { return row.first_key; }
#else
DEV u32 first_key(const RowKvSource&) { return 0; }
#endif
// Returns the first key of the first step, in which the queries of the block attend to a key. Steps are at fixed
// positions.
DEV u32 first_step(const RowKvSource& row) { return first_key(row) / STEP * STEP; }
// Whether the key at `position` is in the context and may be read: earlier keys may have been freed.
DEV bool is_present(const RowKvSource& row, u32 position) {
    return position < row.context && position >= first_key(row);
}

#if WARP_SIZE == 64
#  include "attention_prefill/register_copy.h"
#else
// Starts copying keys and values [at, at + STEP) of a row. Positions that are not present are zero-filled.
DEV void copy_step(KV* stage, const KV* pool, const RowKvSource& row, u32 at) {
    constexpr u32 WIDTH = 16 / sizeof(KV), PIECES = D / WIDTH;
    for (u32 i = tid(); i < STEP * PIECES; i += bdim()) {
        const u32 key = i / PIECES, channel = i % PIECES * WIDTH, position = at + key;
        const bool present = is_present(row, position);
        const u32 block = present ? (u32)row.table[position / BLOCK_TOKENS] : 0;
        const KV* from = pool + ((u64)block * row.kv_heads + row.head) * 2 * BLOCK_TOKENS * D +
                         position % BLOCK_TOKENS * D + channel;
        cp_async16_zfill(stage + key * K_STRIDE + channel, from, present);
        cp_async16_zfill(stage + STEP * K_STRIDE + key * V_STRIDE + channel, from + BLOCK_TOKENS * D, present);
    }
}

// Copies the keys before `end` to shared memory in steps of STEP keys, and calls multiply(stage, first key) for each
// step; a step is copied while the previous step is multiplied. Every thread of the block must call it.
template <class Multiply>
DEV void copy_and_multiply(KV* stages, const KV* pool, const RowKvSource& row, u32 end, const Multiply& multiply) {
    copy_step(stages, pool, row, first_step(row));
    cp_async_commit();
    for (u32 at = first_step(row), stage = 0; at < end; at += STEP) {
        const u32 next = STAGES == 1 ? 0 : stage ^ 1;
        if (STAGES > 1 && at + STEP < end) copy_step(stages + next * STAGE, pool, row, at + STEP);
        cp_async_commit();
        cp_async_wait<STAGES - 1>();
        sync();
        multiply(stages + stage * STAGE, at);
        sync();
        if (STAGES == 1 && at + STEP < end) copy_step(stages, pool, row, at + STEP);
        stage = next;
    }
}
#endif

#if CHANNEL_WARPS > 1
#  include "attention_prefill/partial_scores.h"
#else
DEV u32 own_channel() { return 0; }
#endif

// `v`: number of keys that each query of the lane attends to. `most`: maximum of this number over the queries
// of the warp.
struct VisibleKeyCounts { u32 v[SLOTS], most; };
#if WINDOWED
// `v`: first key that each query of the lane attends to. `least`, `most`: minimum and maximum of this number over
// the queries of the warp.
struct FirstKeys { u32 v[SLOTS], least, most; };
// Masks the scores of the keys of the tile at key `at` that are before the first key of each query.
DEV void mask_first_keys(ScoreFragment& s, const FirstKeys& first, u32 at) {
    UNROLL for (u32 i = 0; i < SLOTS; ++i)
        UNROLL for (u32 j = 0; j < KEYS; ++j)
            if (at + key_of(j) < first.v[i]) s.v[i][j] = NO_SCORE;
}
#else
struct FirstKeys {};
#endif

// Scores of the tile of a step that begins at key `tile` of the step.
DEV ScoreFragment tile_scores(const QueryOperand& q, const KV* stage, u32 tile) {
    return score(q, load_keys(stage + tile * K_STRIDE + own_channel(), K_STRIDE));
}

// Adds the values of the tile at key `tile` of the step at key `at` to the outputs. `s`: the scores of the tile.
DEV void add_tile(SoftmaxState& r, ScoreFragment& s, const KV* stage, u32 at, u32 tile, const VisibleKeyCounts& seen,
                  const FirstKeys& first, float factor) {
#if WINDOWED
    if (at + tile < first.most) mask_first_keys(s, first, at + tile);
#endif
    u32 left[SLOTS];
    UNROLL for (u32 i = 0; i < SLOTS; ++i) left[i] = seen.v[i] > at + tile ? seen.v[i] - at - tile : 0;
    online_softmax(r, s, left, factor);
    add_values(r, s, load_values(stage + STEP * K_STRIDE + tile * V_STRIDE + own_channel(), V_STRIDE, TILE_KEYS));
}

// Returns the first tile of the step at key `at` in which the queries of the warp attend to a key, as the index of its
// first key in the step.
#if WINDOWED
DEV u32 first_tile(const FirstKeys& first, u32 at) {
    return first.least > at ? (first.least - at) / TILE_KEYS * TILE_KEYS : 0;
}
#else
DEV u32 first_tile(const FirstKeys&, u32) { return 0; }
#endif

DEV void multiply_step(SoftmaxState& r, const QueryOperand& q, const KV* stage, u32 at, const VisibleKeyCounts& seen,
                       const FirstKeys& first, float factor) {
#if CHANNEL_WARPS > 1
    // Unrolled, the loops need more registers than a lane has.
    _Pragma("unroll 1") for (u32 tile = first_tile(first, at); tile < STEP && at + tile < seen.most; tile += TILE_KEYS)
        put_partial_scores(tile_scores(q, stage, tile), tile / TILE_KEYS);
    sync();  // All warps of the block meet here, also those without a key in this step.
    _Pragma("unroll 1") for (u32 tile = first_tile(first, at); tile < STEP && at + tile < seen.most; tile += TILE_KEYS) {
        ScoreFragment s = sum_of_partial_scores(tile / TILE_KEYS);
        add_tile(r, s, stage, at, tile, seen, first, factor);
    }
#else
    for (u32 tile = first_tile(first, at); tile < STEP && at + tile < seen.most; tile += TILE_KEYS) {
        ScoreFragment s = tile_scores(q, stage, tile);
        add_tile(r, s, stage, at, tile, seen, first, factor);
    }
#endif
}

DEV void store_outputs(half_t* o, const PrefillParams& job, SoftmaxState& r, u32 first, u32 pairs, u32 head) {
    finish(r);
    float scale[SLOTS];
    UNROLL for (u32 i = 0; i < SLOTS; ++i) {
        const u32 query_head = head * HEAD_GROUP + (first + query_of(i)) % HEAD_GROUP;
        scale[i] = 1.f / denominator(job, r.sum[i], r.max[i], query_head);
    }
    UNROLL for (u32 p = 0; p < PARTS; ++p) {
        const u32 slot = part_slot(p), pair = first + query_of(slot);
        if (pair < pairs) {
            struct alignas(PART * 2) OutputPart { half_t v[PART]; } part;
            UNROLL for (u32 j = 0; j < PART; ++j) part.v[j] = to_half(PART_VALUE(r.out, p, j) * scale[slot]);
            half_t* to = o + (u64)(pair / HEAD_GROUP) * job.o_stride + pair % HEAD_GROUP * D + own_channel();
            *(OutputPart*)(to + part_channel(p)) = part;
        }
    }
}

DEV void prefill(const PrefillParams& job) {
    DYN_SHARED(KV, stages);
    grid_wait();
    const u32 row = job.first_row + bid_z(), head = bid_y(), per_block = bdim() / WARP_SIZE / CHANNEL_WARPS * QUERIES;
    const u32 token = (u32)job.cu_q[row], tokens = (u32)job.cu_q[row + 1] - token, pairs = tokens * HEAD_GROUP;
    const u32 tiles = (pairs + per_block - 1) / per_block;
    if (bid_x() >= tiles) return;
    const u32 begin = (tiles - 1 - bid_x()) * per_block, first = begin + warp_id() / CHANNEL_WARPS * QUERIES;
    const u32 context = (u32)job.context_lens[row];
    half_t* out = job.o + (u64)token * job.o_stride + head * HEAD_GROUP * D;
    if (context < tokens) {  // A padding row has no keys; its outputs are zero.
        for (u32 i = tid(); i < per_block * D; i += bdim()) {
            const u32 pair = begin + i / D;
            if (pair < pairs) out[(u64)(pair / HEAD_GROUP) * job.o_stride + pair % HEAD_GROUP * D + i % D] = to_half(0.f);
        }
        return;
    }

    const u32 before = context - tokens;
    RowKvSource keys{};
    keys.table = table_of(job, row);
    keys.kv_heads = job.kv_heads / KV_SHARERS;
    keys.head = head / KV_SHARERS;
    keys.context = context;
#if WINDOWED
    keys.first_key = first_key_of(job, before + begin / HEAD_GROUP + 1);
#endif
    const half_t* queries = job.q + (u64)token * job.q_stride + head * HEAD_GROUP * D + own_channel();
    const QueryOperand mine = load_queries([&](u32 query) {
        const u32 pair = first + query;
        return pair < pairs ? queries + (u64)(pair / HEAD_GROUP) * job.q_stride + pair % HEAD_GROUP * D : nullptr;
    });
    // A query attends to the keys up to its own position. The results of (query, head) pairs after the last
    // pair of the row are not stored.
    const u32 last_of_warp = first + QUERIES <= pairs ? first + QUERIES - 1 : pairs - 1;
    const u32 last_of_block = begin + per_block <= pairs ? begin + per_block - 1 : pairs - 1;
    VisibleKeyCounts seen{{}, first < pairs ? before + last_of_warp / HEAD_GROUP + 1 : 0};
    UNROLL for (u32 i = 0; i < SLOTS; ++i) seen.v[i] = before + (first + query_of(i)) / HEAD_GROUP + 1;
    const u32 keys_of_block = before + last_of_block / HEAD_GROUP + 1;
    FirstKeys first_keys{};
#if WINDOWED
    UNROLL for (u32 i = 0; i < SLOTS; ++i) first_keys.v[i] = first_key_of(job, seen.v[i]);
    first_keys.least = first_key_of(job, before + first / HEAD_GROUP + 1);
    first_keys.most = first_key_of(job, before + (first + QUERIES - 1) / HEAD_GROUP + 1);
#endif

    SoftmaxState r;
    start(r);
    copy_and_multiply(stages, job.pool, keys, keys_of_block,
                      [&](const KV* stage, u32 at) { multiply_step(r, mine, stage, at, seen, first_keys, job.factor); });
    store_outputs(out, job, r, first, pairs, head);
}
