// moe_align: sorts choices by expert and cuts each expert's run into segments; the grid is one block whatever was chosen, so
// that the launch can be captured. moe_combine: adds up what the experts of a token said.
// CPU twin: `moe_mlp`.
//
// moe_align: order i32 [T top_k], segments [max_segments], experts i32 [T top_k] with global numbers; choices outside
// [first, first + count) are left out. Where a choice lies within its expert's run is free: no result depends on it.
// Grid: 1. Block: a multiple of WAVE, at most 1024. Dynamic shared memory: count * 8 bytes.
//
// moe_combine: y [T, H] = sum of weight * out[c] over a token's choices on this rank, out f32 [T top_k, H], in ascending
// order of experts, in f32, rounded once. -DACT_F32=0|1: y. Grid: (H / 1024, T). Block: 256. top_k at most 64.
// Roofline: T top_k H 4 bytes.
#include "dev.h"
#include "moe/segment.h"

KERNEL(1024) moe_align(u32* order, Segment* segments, const i32* experts, u32 choices, u32 first, u32 count,
                       u32 segment_rows, u32 max_segments) {
    DYN_SHARED(u32, counts);
    u32* next = counts + count;  // Where an expert's next choice goes.
    grid_wait();
    for (u32 e = tid(); e < count; e += bdim()) counts[e] = 0;
    sync();
    for (u32 c = tid(); c < choices; c += bdim()) {
        const u32 e = (u32)experts[c] - first;
        if (e < count) atomic_add(counts + e, 1);
    }
    sync();
    for (u32 e = tid(); e < count; e += bdim()) {
        u32 at = 0, segment = 0;
        for (u32 before = 0; before < e; ++before) {
            at += counts[before];
            segment += (counts[before] + segment_rows - 1) / segment_rows;
        }
        next[e] = at;
        for (u32 done = 0; done < counts[e]; done += segment_rows, ++segment) {
            const u32 left = counts[e] - done;
            segments[segment] = Segment{e, at + done, left < segment_rows ? left : segment_rows, 0};
        }
        // Whoever has the last expert knows how many segments there are.
        if (e == count - 1)
            for (; segment < max_segments; ++segment) segments[segment] = Segment{0, 0, 0, 0};
    }
    sync();
    for (u32 c = tid(); c < choices; c += bdim()) {
        const u32 e = (u32)experts[c] - first;
        if (e < count) order[atomic_add(next + e, 1)] = c;
    }
}
EXPORT(moe_align)

KERNEL(256) moe_combine(ACT* y, const float* out, const i32* experts, const float* weights, u32 h, u32 top_k, u32 first,
                        u32 count, u32 y_stride) {
    SHARED(u32, chosen, 64);
    SHARED(float, share, 64);
    grid_wait();
    const u32 token = bid_y();
    if (tid() < top_k) {
        // A choice's place among the token's choices, by expert. Experts of other ranks come behind all.
        const u32 mine = (u32)experts[token * top_k + tid()] - first;
        u32 place = 0;
        for (u32 j = 0; j < top_k; ++j) {
            const u32 other = (u32)experts[token * top_k + j] - first;
            const bool ahead = mine < count ? other < mine : other < count || j < tid();
            place += ahead;
        }
        chosen[place] = mine < count ? token * top_k + tid() : ~0u;
        share[place] = weights[token * top_k + tid()];
    }
    sync();
    const u32 at = (bid_x() * bdim() + tid()) * 4;
    if (at >= h) return;
    f32x4 sum{{0.f, 0.f, 0.f, 0.f}};
    for (u32 j = 0; j < top_k && chosen[j] != ~0u; ++j) {
        const f32x4 x = *(const f32x4*)(out + (u64)chosen[j] * h + at);
        for (u32 i = 0; i < 4; ++i) sum.v[i] = fma_(share[j], x.v[i], sum.v[i]);
    }
    for (u32 i = 0; i < 4; ++i) y[(u64)token * y_stride + at + i] = to<ACT>(sum.v[i]);
}
EXPORT(moe_combine)
