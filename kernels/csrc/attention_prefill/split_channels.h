// attention_prefill/split_channels.h - the two consumer warpgroups have the same pairs of a tile and half of the channels
// each, and add their partial scores.
#pragma once

enum : u32 { GROUP_THREADS = 4 * WARP_SIZE, SCORE_VECTORS = SCORES / 4 };
static_assert(!KV_FP8, "the buffers of fp8 keys and values and the partial scores exceed shared memory");

// Adds the partial scores `s` of both consumer warpgroups; both get the same sums. Successive steps use two buffers in
// turn: when all warps have stored the partial scores of a step, they have read those of the step before.
DEV void add_partial_scores(float (&s)[SCORES], ConsumerState& w, const SharedMemoryLayout& shared, PipelineBarriers* m) {
    const u32 step = w.sequence_waits++, thread = tid() % GROUP_THREADS;
    f32x4* buffer = (f32x4*)shared.partial_scores + step % 2 * CHANNEL_GROUPS * SCORE_VECTORS * GROUP_THREADS + thread;
    f32x4* own = buffer + w.group * SCORE_VECTORS * GROUP_THREADS;
    const f32x4* other = buffer + (w.group ^ 1) * SCORE_VECTORS * GROUP_THREADS;
    UNROLL for (u32 i = 0; i < SCORE_VECTORS; ++i)
        own[i * GROUP_THREADS] = f32x4{{s[i * 4], s[i * 4 + 1], s[i * 4 + 2], s[i * 4 + 3]}};
    warp_sync();
    release(&m->partial_scores);
    barrier_wait(&m->partial_scores, step & 1);
    UNROLL for (u32 i = 0; i < SCORE_VECTORS; ++i) {
        const f32x4 scores = other[i * GROUP_THREADS];
        UNROLL for (u32 e = 0; e < 4; ++e) s[i * 4 + e] += scores.v[e];
    }
}
