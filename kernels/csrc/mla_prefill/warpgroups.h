// mla_prefill/warpgroups.h - prefill by warpgroups (ping-pong schedule): one producer warp (fetch.h), and two
// consumer warpgroups with 64 tokens of a tile each. While one consumer computes softmax, the WGMMAs of the
// other run. Probabilities stay in registers as the A operand of the next WGMMA; the scores of a step overlap
// with the previous step's multiplication by the values.
#pragma once
#include "dev/wgmma.h"
#include "attention/softmax.h"
#include "mla_prefill/tile_schedule.h"
#include "mla_prefill/fetch.h"

enum : u32 {
    GROUP_TOKENS = 64,
    SCORES = TILE / 2,    // scores per lane: of two tokens, each with a quarter of the keys
    OUTPUTS = VALUE / 2,  // outputs per lane
    STORED_BYTES = 16 * 128,  // staging buffer of outputs per warp: 64 channels of its 16 tokens
    GROUPS_SHARED = (1 + STAGES) * KEY_BYTES + STAGES * VALUE_BYTES + CONSUMER_WARPS * STORED_BYTES + 1024
};

DEV void start_scores(float (&s)[SCORES], const u8* queries, const u8* keys) {
    const KMajorOperand q = warp_uniform(by_k(queries)), k = warp_uniform(by_k(keys));
    wgmma_fence_operand(s);
    wgmma_fence();
    UNROLL for (u32 i = 0; i < (QK_NOPE_HEAD_DIM + QK_ROPE_HEAD_DIM) / 16; ++i) {
        const u32 at = i / 4 * PANEL_BYTES + i % 4 * 32;
        wgmma<TILE>(s, advanced(q, at), advanced(k, at), i != 0);
    }
    wgmma_commit();
}

DEV void start_outputs(float (&o)[OUTPUTS], const ProbabilityFragment<SCORES>& p, const u8* values) {
    const NMajorOperand v = warp_uniform(by_n(values, PANEL_BYTES));
    wgmma_fence_operand(o);
    wgmma_fence();
    UNROLL for (u32 i = 0; i < TILE / 16; ++i) wgmma<VALUE>(o, p.v[i], advanced(v, i * 16 * 128), true);
    wgmma_commit();
}

// State of a consumer warpgroup: its current stage of each pipeline.
struct ConsumerState {
    u32 group;  // 0 or 1
    PipelineState items, keys, values;
    u32 sequence_waits;
};

// Processes the keys of a work item that are in the window of this launch: updates its outputs `o`, which are
// not yet divided by the sums of probabilities, and its softmax state `r`.
DEV void multiply(float (&o)[OUTPUTS], SoftmaxRowState& r, ConsumerState& w, const SharedMemoryLayout& shared,
                  PipelineBarriers* m, const WorkTile& item, float factor) {
    const u8* queries = shared.queries + w.group * GROUP_TOKENS * 128;
    const u32 first = item.first + w.group * GROUP_TOKENS, unmasked_steps = seen_by(item, first) / TILE;
    const u32 seen[2] = {seen_by(item, first + wgmma_row(0)), seen_by(item, first + wgmma_row(2))};
    float s[SCORES], rescale[2];
    ProbabilityFragment<SCORES> p;
    const auto keys = [&] {
        barrier_wait(&m->keys.full[w.keys.stage], w.keys.phase);
        return shared.keys + w.keys.stage * KEY_BYTES;
    };
    const auto values = [&] {
        barrier_wait(&m->values.full[w.values.stage], w.values.phase);
        return shared.values + w.values.stage * VALUE_BYTES;
    };
    const auto softmax_step = [&](u32 step) {
        wgmma_fence_operand(s);
        release(&m->keys.empty[w.keys.stage]);
        if (step + 1 == item.range.end) release(&m->item_empty);
        advance<STAGES>(w.keys);
        if (step < unmasked_steps) return online_softmax<false>(s, r, rescale, seen, factor);
        const u32 at = step * TILE, left[2] = {seen[0] > at ? seen[0] - at : 0, seen[1] > at ? seen[1] - at : 0};
        online_softmax<true>(s, r, rescale, left, factor);
    };
    const auto finish_outputs = [&] {
        wgmma_wait<0>();
        wgmma_fence_operand(o);
        release(&m->values.empty[w.values.stage]);
        advance<STAGES>(w.values);
    };

    start_scores(s, queries, keys());
    wgmma_wait<0>();
    softmax_step(item.range.step);
    if (item.range.step != 0)
        UNROLL for (u32 i = 0; i < OUTPUTS; ++i) o[i] *= rescale[i >> 1 & 1];
    pack(p, s);
    for (u32 step = item.range.step + 1; step < item.range.end; ++step) {
        const u8* step_keys = keys();
        barrier_wait(&m->sequence[w.group], w.sequence_waits++ & 1);
        start_scores(s, queries, step_keys);
        start_outputs(o, p, values());
        release(&m->sequence[w.group ^ 1]);
        wgmma_wait<1>();
        softmax_step(step);
        finish_outputs();
        UNROLL for (u32 i = 0; i < OUTPUTS; ++i) o[i] *= rescale[i >> 1 & 1];
        pack(p, s);
    }
    start_outputs(o, p, values());
    finish_outputs();
}

// Stores the outputs: a warp transposes its 16 rows through shared memory, so that its stores are coalesced.
DEV void store(const MlaPrefillParams& job, const WorkTile& item, u32 group, u8* panel, const float (&o)[OUTPUTS],
               const float (&scale)[2]) {
    constexpr u32 ROWS_PER_PASS = WARP_SIZE / 8;
    const u32 first = item.first + group * GROUP_TOKENS + (warp_id() & 3) * 16;
    half_t* out = job.o + (u64)(item.token + first) * job.o_stride + item.head * VALUE;
    UNROLL for (u32 part = 0; part < VALUE_PANELS; ++part) {
        UNROLL for (u32 i = 0; i < 32; i += 2) {
            const u32 row = wgmma_row(i) % 16, column = wgmma_col(i), token = i >> 1 & 1;
            *(u32*)(panel + panel_offset(row, column / 8) + column % 8 * 2) =
                pack_half(o[part * 32 + i] * scale[token], o[part * 32 + i + 1] * scale[token]);
        }
        warp_sync();
        UNROLL for (u32 i = 0; i < 16; i += ROWS_PER_PASS) {
            const u32 row = i + lane() / 8, piece = lane() % 8;
            const u32x4 values = *(const u32x4*)(panel + panel_offset(row, piece));
            if (first + row < item.tokens) *(u32x4*)(out + (u64)row * job.o_stride + part * 64 + piece * 8) = values;
        }
        warp_sync();
    }
}

// Returns the address at which this lane stores its outputs and softmax state between windows of keys
// (carry_over.h).
DEV f32x4* carry_over_of(const MlaPrefillParams& job, const WorkTile& item) {
    return carry_over_of(job, item.row, item.token, item.first, TILE, item.head, OUTPUTS / 4 + 1) + tid() - 4 * WARP_SIZE;
}
DEV void save_carry_over(f32x4* to, const float (&o)[OUTPUTS], const SoftmaxRowState& r) {
    UNROLL for (u32 i = 0; i < OUTPUTS; i += 4)
        to[i / 4 * CONSUMER_THREADS] = f32x4{{o[i], o[i + 1], o[i + 2], o[i + 3]}};
    to[OUTPUTS / 4 * CONSUMER_THREADS] = f32x4{{r.max[0], r.max[1], r.sum[0], r.sum[1]}};
}
DEV void load_carry_over(const f32x4* from, float (&o)[OUTPUTS], SoftmaxRowState& r) {
    UNROLL for (u32 i = 0; i < OUTPUTS; i += 4) {
        const f32x4 four = from[i / 4 * CONSUMER_THREADS];
        UNROLL for (u32 j = 0; j < 4; ++j) o[i + j] = four.v[j];
    }
    const f32x4 stats = from[OUTPUTS / 4 * CONSUMER_THREADS];
    UNROLL for (u32 i = 0; i < 2; ++i) {
        r.max[i] = stats.v[i];
        r.sum[i] = stats.v[2 + i];
    }
}

DEV void consume_items(const SharedMemoryLayout& shared, PipelineBarriers* m, const MlaPrefillParams& job) {
    ConsumerState w{};
    w.group = warp_id() / 4 - 1;
    u8* panel = shared.outputs + (warp_id() - 4) * STORED_BYTES;
    for (;; advance<1>(w.items)) {
        barrier_wait(&m->item_full, w.items.phase);
        const WorkTile item = m->item;
        if (item.tokens == 0) return;
        float o[OUTPUTS], scale[2] = {0.f, 0.f};
        SoftmaxRowState r{{NO_SCORE, NO_SCORE}, {0.f, 0.f}};
        UNROLL for (u32 i = 0; i < OUTPUTS; ++i) o[i] = 0.f;
        if (has_keys_here(item)) {
            if (item.range.step != 0) load_carry_over(carry_over_of(job, item), o, r);
            multiply(o, r, w, shared, m, item, job.factor);
            if (item.range.end != item.range.steps) {
                save_carry_over(carry_over_of(job, item), o, r);
                continue;
            }
            UNROLL for (u32 token = 0; token < 2; ++token) scale[token] = 1.f / group_sum<4>(r.sum[token]);
        } else {
            warp_sync();
            release(&m->item_empty);
        }
        store(job, item, w.group, panel, o, scale);
    }
}

DEV void init_barriers(PipelineBarriers* m) {
    for (u32 i = 0; i < STAGES; ++i) {
        barrier_init(&m->keys.full[i], 1);
        barrier_init(&m->values.full[i], 1);
        barrier_init(&m->keys.empty[i], CONSUMER_WARPS);
        barrier_init(&m->values.empty[i], CONSUMER_WARPS);
    }
    barrier_init(&m->item_full, 1);
    barrier_init(&m->item_empty, CONSUMER_WARPS);
    for (u32 i = 0; i < 2; ++i) barrier_init(&m->sequence[i], CONSUMER_WARPS / 2);
    barriers_ready();
}

DEV void prefill(const MlaPrefillParams& job) {
    DYN_SHARED(u8, dynamic);
    SHARED(PipelineBarriers, pipeline, 1);
    if (tid() == 0) init_barriers(pipeline);
    sync();
    grid_wait();
    const SharedMemoryLayout shared = shared_layout(dynamic);
    if (warp_id() < 4) {
        reg_dealloc<56>();
        if (warp_id() == 0) fetch_all(shared, pipeline, job);
    } else {
        reg_alloc<224>();
        if (warp_id() >= 8) release(&pipeline->sequence[0]);  // The other warpgroup goes first.
        consume_items(shared, pipeline, job);
    }
}
