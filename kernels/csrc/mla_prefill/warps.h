// mla_prefill/warps.h - prefill by single warps: each warp has a tile of 16 tokens, the warps of a block have
// consecutive tiles. A run (COPIED successive keys and values) is copied to shared memory while the previous
// run is multiplied.
#pragma once

#ifndef STAGES
#  define STAGES 2
#endif

enum : u32 {
    COPIED = 64,  // keys per copy run
    // Row strides in shared memory, in elements.
    K_STRIDE = QK_NOPE_HEAD_DIM + QK_ROPE_HEAD_DIM + KEY_PADDING,
    V_STRIDE = VALUE + VALUE_PADDING,
    STAGE = COPIED * (K_STRIDE + V_STRIDE)
};

// Returns the index of the first key of row i in the list of keys of all long rows (long_rows.h).
DEV u32 begin_of(const LongRows& rows, u32 i) {
    u32 sum = 0;
    for (u32 j = lane(); j < i; j += WARP_SIZE) sum += span_of(lengths_of(rows, j));
    return warp_sum(sum);
}

#if WARP_SIZE == 64
#  include "mla_prefill/register_copy.h"
#else
// Starts copying a run of COPIED keys and values of one head to shared memory, from key `row` of the window
// on.
DEV void copy_run(half_t* stage, const MlaPrefillParams& job, u32 head, u32 row) {
    constexpr u32 OWN = QK_NOPE_HEAD_DIM / 8, KEY = OWN + QK_ROPE_HEAD_DIM / 8, PIECES = KEY + VALUE / 8;
    for (u32 i = tid(); i < COPIED * PIECES; i += bdim()) {
        const u32 key = i / PIECES, piece = i % PIECES;
        const half_t* from = job.kv + (u64)(row + key) * job.kv_stride;
        half_t* to = stage + key * K_STRIDE + piece * 8;
        if (piece < OWN) from += head * QK_NOPE_HEAD_DIM + piece * 8;
        else if (piece < KEY) from += job.rope_column + (piece - OWN) * 8;
        else {
            from += job.values + head * VALUE + (piece - KEY) * 8;
            to = stage + COPIED * K_STRIDE + key * V_STRIDE + (piece - KEY) * 8;
        }
        cp_async16(to, from);
    }
}

// Copies keys [at, at + COPIED), [at + COPIED, at + 2 COPIED), .. up to `end` to shared memory, and calls
// multiply(stage, first key) for each of these runs; a run is copied while the previous run is multiplied.
// Key `at` of the row is key `from` of the window. Every thread of the block must call it.
template <class Multiply>
DEV void copy_and_multiply(half_t* stages, const MlaPrefillParams& job, u32 head, u32 at, u32 end, u32 from,
                           const Multiply& multiply) {
    copy_run(stages, job, head, from);
    cp_async_commit();
    for (u32 stage = 0; at < end; at += COPIED, from += COPIED) {
        const u32 next = STAGES == 1 ? 0 : stage ^ 1;
        if (STAGES > 1 && at + COPIED < end) copy_run(stages + next * STAGE, job, head, from + COPIED);
        cp_async_commit();
        cp_async_wait<STAGES - 1>();
        sync();
        multiply(stages + stage * STAGE, at);
        sync();
        if (STAGES == 1 && at + COPIED < end) copy_run(stages, job, head, from + COPIED);
        stage = next;
    }
}
#endif

// `v`: number of keys that each query of the lane attends to. `most`: maximum of this number over the queries
// of the warp.
struct VisibleKeyCounts { u32 v[SLOTS], most; };

DEV void multiply_run(SoftmaxState& r, const QueryOperand& q, const half_t* stage, u32 at, const VisibleKeyCounts& seen,
                      float factor) {
    for (u32 tile = 0; tile < COPIED && at + tile < seen.most; tile += TILE_KEYS) {
        const KeyOperand k = load_keys(stage + tile * K_STRIDE, K_STRIDE);
        ScoreFragment s = score(q, k);
        u32 left[SLOTS];
        UNROLL for (u32 i = 0; i < SLOTS; ++i) left[i] = seen.v[i] > at + tile ? seen.v[i] - at - tile : 0;
        online_softmax(r, s, left, factor);
        add_values(r, s, load_values(stage + COPIED * K_STRIDE + tile * V_STRIDE, V_STRIDE, TILE_KEYS));
    }
}

DEV void store_outputs(half_t* o, u32 o_stride, SoftmaxState& r, u32 first, u32 tokens) {
    finish(r);
    float scale[SLOTS];
    UNROLL for (u32 i = 0; i < SLOTS; ++i) scale[i] = 1.f / r.sum[i];
    UNROLL for (u32 p = 0; p < PARTS; ++p) {
        const u32 slot = part_slot(p), token = first + query_of(slot);
        if (token < tokens) {
            struct alignas(PART * 2) OutputPart { half_t v[PART]; } part;
            UNROLL for (u32 j = 0; j < PART; ++j) part.v[j] = to_half(PART_VALUE(r.out, p, j) * scale[slot]);
            *(OutputPart*)(o + (u64)token * o_stride + part_channel(p)) = part;
        }
    }
}

DEV void save_carry_over(f32x4* to, const SoftmaxState& r) {
    f32x4 stats{};
    UNROLL for (u32 i = 0; i < SLOTS; ++i) {
        stats.v[i] = r.max[i];
        stats.v[2 + i] = r.sum[i];
    }
    UNROLL for (u32 i = 0; i < SUMS; ++i) to[i * CONSUMER_THREADS] = r.out[i];
    to[SUMS * CONSUMER_THREADS] = stats;
}
DEV void load_carry_over(const f32x4* from, SoftmaxState& r) {
    UNROLL for (u32 i = 0; i < SUMS; ++i) r.out[i] = from[i * CONSUMER_THREADS];
    const f32x4 stats = from[SUMS * CONSUMER_THREADS];
    UNROLL for (u32 i = 0; i < SLOTS; ++i) {
        r.max[i] = stats.v[i];
        r.sum[i] = stats.v[2 + i];
    }
}

// Processes keys [at, end) of the row of this block. Key `at` of the row is key `from` of the window.
DEV void multiply(SoftmaxState& r, const QueryOperand& mine, const MlaPrefillParams& job, half_t* stages, u32 at,
                  u32 end, u32 from, const VisibleKeyCounts& seen) {
    copy_and_multiply(stages, job, bid_y(), at, end, from,
                      [&](const half_t* stage, u32 key) { multiply_run(r, mine, stage, key, seen, job.factor); });
}

DEV void prefill(const MlaPrefillParams& job) {
    DYN_SHARED(half_t, stages);
    grid_wait();
    const u32 row = bid_z(), head = bid_y(), per_block = bdim() / WARP_SIZE * QUERIES;
    const RowLengths lengths = lengths_of(job.rows, row);
    const u32 tiles = (lengths.tokens + per_block - 1) / per_block;
    if (bid_x() >= tiles) return;
    const u32 token = (u32)job.rows.cu_q[job.rows.first + row], tokens = lengths.tokens;
    const u32 begin = (tiles - 1 - bid_x()) * per_block, first = begin + warp_id() * QUERIES;
    half_t* out = job.o + (u64)token * job.o_stride + head * VALUE;
    if (lengths.context < tokens) {  // A padding row has no keys; its outputs are zero.
        for (u32 i = tid(); job.window.begin == 0 && i < per_block * VALUE; i += bdim())
            if (begin + i / VALUE < tokens) out[(u64)(begin + i / VALUE) * job.o_stride + i % VALUE] = to_half(0.f);
        return;
    }

    const u32 before = lengths.context - tokens;
    const u32 last_of_warp = first + QUERIES <= tokens ? first + QUERIES - 1 : tokens - 1;
    const u32 keys_of_block = before + (begin + per_block <= tokens ? begin + per_block : tokens);
    const StepRange range = steps_in_window(keys_of_block, begin_of(job.rows, row), job.window);
    if (range.step >= range.end) return;
    const half_t* queries = job.q + (u64)token * job.q_stride + head * (QK_NOPE_HEAD_DIM + QK_ROPE_HEAD_DIM);
    const QueryOperand mine = load_queries([&](u32 query) {
        return first + query < tokens ? queries + (u64)(first + query) * job.q_stride : nullptr;
    });
    // A query attends to the keys up to its own position. Results of tokens after the last token of the row
    // are not stored.
    VisibleKeyCounts seen{{}, first < tokens ? before + last_of_warp + 1 : 0};
    UNROLL for (u32 i = 0; i < SLOTS; ++i) seen.v[i] = before + first + query_of(i) + 1;
    const u32 end = range.end * STEP_KEYS;
    seen.most = seen.most < end ? seen.most : end;

    f32x4* carried = carry_over_of(job, row, token, begin, per_block, head, SUMS + 1) + tid();
    SoftmaxState r;
    if (range.step == 0) start(r);
    else load_carry_over(carried, r);
    multiply(r, mine, job, stages, range.step * STEP_KEYS, keys_of_block < end ? keys_of_block : end, range.at, seen);
    if (range.end == range.steps) store_outputs(out, job.o_stride, r, first, tokens);
    else save_carry_over(carried, r);
}
