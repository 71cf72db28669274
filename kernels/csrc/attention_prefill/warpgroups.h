// attention_prefill/warpgroups.h - prefill by warpgroups (ping-pong schedule): one producer (load.h), and two
// consumers with 64 (query, head) pairs of a tile each. While one consumer computes softmax, the WGMMAs of
// the other run. Probabilities stay in registers as the A operand of the next WGMMA; the scores of a step
// overlap with the previous step's multiplication by the values.
//
// With heads of 512 channels the outputs of 64 pairs exceed the registers of a warpgroup. Both consumers then have the
// same 64 pairs and half of the channels each: they add their partial scores through shared memory (split_channels.h),
// and have equal probabilities.
#pragma once
#include "dev/tensor_map.h"
#include "dev/wgmma.h"
#include "attention/softmax.h"
#include "attention_prefill/tile_schedule.h"
#if KV_FP8
#  include "attention_prefill/load_fp8.h"
#else
#  include "attention_prefill/load_half.h"
#endif

enum : u32 {
    GROUP_PAIRS = 64,
    SCORES = TILE / 2,    // scores per lane: of two pairs, each with a quarter of the keys
    GROUP_D = D / CHANNEL_GROUPS,  // channels of a consumer warpgroup
    OUTPUTS = GROUP_D / 2,     // outputs per lane
    GROUPS_SHARED = ITEM_STAGES * QUERY_BYTES + OUTPUT_BYTES + 2 * STAGES * OPERAND_BYTES + 2 * STAGED_BYTES +
                    PARTIAL_SCORE_BYTES + 1024
};

// First pair of a tile, and first panel of an operand, of consumer warpgroup `group`.
DEV u32 pairs_before(u32 group) { return CHANNEL_GROUPS == 1 ? group * GROUP_PAIRS : 0; }
DEV u32 panels_before(u32 group) { return CHANNEL_GROUPS == 1 ? 0 : group * (PANELS / CHANNEL_GROUPS); }

// Starts the WGMMAs of the scores over GROUP_D channels, whose first panels are `queries` and `keys`.
DEV void start_scores(float (&s)[SCORES], const u8* queries, const u8* keys) {
    const KMajorOperand q = warp_uniform(by_k(queries)), k = warp_uniform(by_k(keys));
    wgmma_fence_operand(s);
    wgmma_fence();
    UNROLL for (u32 i = 0; i < GROUP_D / 16; ++i) {
        const u32 piece = i % 4 * 32;
        wgmma<TILE>(s, advanced(q, i / 4 * QUERY_PANEL_BYTES + piece), advanced(k, i / 4 * PANEL_BYTES + piece), i != 0);
    }
    wgmma_commit();
}

DEV void start_outputs(float (&o)[OUTPUTS], const ProbabilityFragment<SCORES>& p, const u8* values, bool add) {
    const NMajorOperand v = warp_uniform(by_n(values, PANEL_BYTES));
    wgmma_fence_operand(o);
    wgmma_fence();
    UNROLL for (u32 i = 0; i < TILE / 16; ++i) wgmma<GROUP_D>(o, p.v[i], advanced(v, i * 16 * 128), add || i != 0);
    wgmma_commit();
}

// State of a consumer warpgroup: its current stage of each pipeline.
struct ConsumerState {
    u32 group;         // 0 or 1
    PipelineState items, keys, values;
    u32 sequence_waits;  // of turns, or of partial scores
};

#if HEAD_DIM > 256
#  include "attention_prefill/split_channels.h"
#else
DEV void add_partial_scores(float (&)[SCORES], ConsumerState&, const SharedMemoryLayout&, PipelineBarriers*) {}
#endif

// Waits for the turn of this consumer warpgroup to start WGMMAs, and ends it. Warpgroups that share the pairs of a tile
// do not take turns.
DEV void begin_turn(ConsumerState& w, PipelineBarriers* m) {
    if (CHANNEL_GROUPS == 1) barrier_wait(&m->sequence[w.group], w.sequence_waits++ & 1);
}
DEV void end_turn(const ConsumerState& w, PipelineBarriers* m) {
    if (CHANNEL_GROUPS == 1) release(&m->sequence[w.group ^ 1]);
}

// Computes the outputs of one work item, not yet divided by the sums of probabilities.
DEV void multiply(float (&o)[OUTPUTS], SoftmaxRowState& r, ConsumerState& w, const SharedMemoryLayout& shared,
                  PipelineBarriers* m, const WorkTile& item, const PrefillParams& job) {
    const float factor = job.factor;
    const u8* queries = shared.queries + w.items.stage * QUERY_BYTES + pairs_before(w.group) * 128 +
                        panels_before(w.group) * QUERY_PANEL_BYTES;
    const u32 first = item.first + pairs_before(w.group), unmasked_steps = seen_by(item, first) / TILE;
    const u32 seen[2] = {seen_by(item, first + wgmma_row(0)), seen_by(item, first + wgmma_row(2))};
#if WINDOWED
    const u32 first_keys[2] = {first_key_of(job, seen[0]), first_key_of(job, seen[1])};
    // First step from which all pairs of the group attend to all keys up to their own.
    const u32 windowed_steps = (first_key_of(job, seen_by(item, first + GROUP_PAIRS - 1)) + TILE - 1) / TILE;
#endif
    const u32 begin = first_step(item);
    float s[SCORES], rescale[2];
    ProbabilityFragment<SCORES> p;
    const auto keys = [&] {
        barrier_wait(&m->keys.full[w.keys.stage], w.keys.phase);
        return shared.keys + w.keys.stage * OPERAND_BYTES + panels_before(w.group) * PANEL_BYTES;
    };
    const auto values = [&] {
        barrier_wait(&m->values.full[w.values.stage], w.values.phase);
        return shared.values + w.values.stage * OPERAND_BYTES + panels_before(w.group) * PANEL_BYTES;
    };
    const auto softmax_step = [&](u32 step) {
        wgmma_fence_operand(s);
        release(&m->keys.empty[w.keys.stage]);
        if (step + 1 == item.steps) release(&m->items.empty[w.items.stage]);
        advance<STAGES>(w.keys);
        add_partial_scores(s, w, shared, m);
#if WINDOWED
        if (step < windowed_steps) {
            const u32 before = step * TILE;
            const u32 masked[2] = {first_keys[0] > before ? first_keys[0] - before : 0,
                                   first_keys[1] > before ? first_keys[1] - before : 0};
            mask_first_scores(s, masked);
        }
#endif
        if (step < unmasked_steps) return online_softmax<false, WINDOWED>(s, r, rescale, seen, factor);
        const u32 at = step * TILE, left[2] = {seen[0] > at ? seen[0] - at : 0, seen[1] > at ? seen[1] - at : 0};
        online_softmax<true, WINDOWED>(s, r, rescale, left, factor);
    };
    const auto finish_outputs = [&] {
        wgmma_wait<0>();
        wgmma_fence_operand(o);
        release(&m->values.empty[w.values.stage]);
        advance<STAGES>(w.values);
    };

    start_scores(s, queries, keys());
    wgmma_wait<0>();
    softmax_step(begin);
    pack(p, s);
    for (u32 step = begin + 1; step < item.steps; ++step) {
        const u8* step_keys = keys();
        begin_turn(w, m);
        start_scores(s, queries, step_keys);
        start_outputs(o, p, values(), step != begin + 1);
        end_turn(w, m);
        wgmma_wait<1>();
        softmax_step(step);
        finish_outputs();
        UNROLL for (u32 i = 0; i < OUTPUTS; ++i) o[i] *= rescale[i >> 1 & 1];
        pack(p, s);
    }
    start_outputs(o, p, values(), item.steps != begin + 1);
    finish_outputs();
}

#if HEAD_DIM > 128
// Transposes a 4x4 matrix of words of which each of four successive lanes has a column: lane i then has row i.
DEV void transpose_4x4(u32 (&words)[4]) {
    UNROLL for (u32 mask = 1; mask < 4; mask *= 2)
        UNROLL for (u32 i = 0; i < 4; ++i) {
            if (i & mask) continue;
            const bool upper = lane() & mask;
            const u32 other = shfl_xor(upper ? words[i] : words[i + mask], mask);
            words[i] = upper ? other : words[i];
            words[i + mask] = upper ? words[i + mask] : other;
        }
}

// Stores the outputs: the four lanes that have the columns of a row exchange them, so that a lane stores eight successive
// columns at a time.
DEV void store(const PrefillParams& job, const WorkTile& item, u32 group, u8*, const float (&o)[OUTPUTS],
               const float (&scale)[2]) {
    UNROLL for (u32 row = 0; row < 2; ++row) {
        const u32 pair = item.first + pairs_before(group) + wgmma_row(row * 2);
        half_t* out = job.o + (u64)(item.token + pair / HEAD_GROUP) * job.o_stride +
                      (item.head * HEAD_GROUP + pair % HEAD_GROUP) * D + panels_before(group) * 64 + (lane() & 3) * 8;
        UNROLL for (u32 column = 0; column < GROUP_D; column += 32) {
            u32x4 words;
            UNROLL for (u32 j = 0; j < 4; ++j) {
                const u32 i = column / 2 + j * 4 + row * 2;
                words.v[j] = pack_half(o[i] * scale[row], o[i + 1] * scale[row]);
            }
            transpose_4x4(words.v);
            if (pair < item.pairs) *(u32x4*)(out + column) = words;
        }
    }
}
#else
// Stores the outputs: a warp transposes its 16 rows through shared memory, so that its stores are coalesced
// whole rows.
DEV void store(const PrefillParams& job, const WorkTile& item, u32 group, u8* panels, const float (&o)[OUTPUTS],
               const float (&scale)[2]) {
    constexpr u32 PIECES = D / 8, ROWS_PER_PASS = WARP_SIZE / PIECES, PANEL = 16 * 128;
    UNROLL for (u32 i = 0; i < OUTPUTS; i += 2) {
        const u32 row = wgmma_row(i) % 16, column = wgmma_col(i), pair = i >> 1 & 1;
        u8* to = panels + column / 64 * PANEL + panel_offset(row, column % 64 / 8) + column % 8 * 2;
        *(u32*)to = pack_half(o[i] * scale[pair], o[i + 1] * scale[pair]);
    }
    warp_sync();
    half_t* out = job.o + (u64)item.token * job.o_stride + item.head * HEAD_GROUP * D;
    UNROLL for (u32 i = 0; i < 16; i += ROWS_PER_PASS) {
        const u32 row = i + lane() / PIECES, piece = lane() % PIECES;
        const u32 pair = item.first + group * GROUP_PAIRS + (warp_id() & 3) * 16 + row;
        const u32x4 values = *(const u32x4*)(panels + piece / 8 * PANEL + panel_offset(row, piece % 8));
        if (pair < item.pairs)
            *(u32x4*)(out + (u64)(pair / HEAD_GROUP) * job.o_stride + pair % HEAD_GROUP * D + piece * 8) = values;
    }
    warp_sync();
}
#endif

DEV void consume_items(const SharedMemoryLayout& shared, PipelineBarriers* m, const PrefillParams& job) {
    ConsumerState w{};
    w.group = warp_id() / 4 - 1;
    u8* outputs = shared.outputs + (warp_id() - 4) * 16 * D * 2;
    for (;; advance<ITEM_STAGES>(w.items)) {
        barrier_wait(&m->items.full[w.items.stage], w.items.phase);
        const WorkTile item = m->item[w.items.stage];
        if (item.pairs == 0) return;
        float o[OUTPUTS], scale[2] = {0.f, 0.f};
        SoftmaxRowState r{{NO_SCORE, NO_SCORE}, {0.f, 0.f}};
        if (item.steps != 0) {
            multiply(o, r, w, shared, m, item, job);
            UNROLL for (u32 row = 0; row < 2; ++row) {
                const u32 pair = item.first + pairs_before(w.group) + wgmma_row(row * 2);
                const u32 head = item.head * HEAD_GROUP + pair % HEAD_GROUP;
                scale[row] = 1.f / denominator(job, group_sum<4>(r.sum[row]), r.max[row] * job.factor, head);
            }
        } else {
            UNROLL for (u32 i = 0; i < OUTPUTS; ++i) o[i] = 0.f;
            warp_sync();
            release(&m->items.empty[w.items.stage]);
        }
        store(job, item, w.group, outputs, o, scale);
    }
}

DEV void init_barriers(PipelineBarriers* m) {
    for (u32 i = 0; i < STAGES; ++i) {
        barrier_init(&m->items.full[i], QUERY_WARPS);
        barrier_init(&m->items.empty[i], CONSUMER_WARPS);
        barrier_init(&m->keys.full[i], ROW_WARPS);
        barrier_init(&m->values.full[i], ROW_WARPS);
        barrier_init(&m->keys.empty[i], CONSUMER_WARPS);
        barrier_init(&m->values.empty[i], CONSUMER_WARPS);
    }
    barrier_init(&m->tail_full, 1);
    barrier_init(&m->partial_scores, CONSUMER_WARPS);
    for (u32 i = 0; i < 2; ++i) barrier_init(&m->sequence[i], CONSUMER_WARPS / 2);
    barriers_ready();
}

DEV void prefill(const PrefillParams& job) {
    DYN_SHARED(u8, dynamic);
    SHARED(PipelineBarriers, pipeline, 1);
    if (tid() == 0) init_barriers(pipeline);
    sync();
    grid_wait();
    const SharedMemoryLayout shared = shared_layout(dynamic);
    if (warp_id() < 4) {
        reg_dealloc<56>();
        fetch_all(shared, pipeline, job);
    } else {
        reg_alloc<224>();
        if (CHANNEL_GROUPS == 1 && warp_id() >= 8) release(&pipeline->sequence[0]);  // The other warpgroup goes first.
        consume_items(shared, pipeline, job);
    }
}
