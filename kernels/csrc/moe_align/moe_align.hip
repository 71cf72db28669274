// moe_align.hip - moe_align sorts choices ((token, expert) pairs, see moe/segment.h) by expert, and cuts the
// choices of each expert into segments. If moe_align has several blocks, each block sorts one part of the
// choices, and moe_count first counts the choices of each expert in each part. moe_combine adds the expert
// outputs of each token. Grids depend only on the number of choices, so that launches can be captured. CPU
// reference: `ExpertMlp`.
//
// Input of moe_count and moe_align: experts i32 [tokens * top_k], global expert ids; choices of experts
// outside [first, first + count) are skipped. Outputs: counts [parts, count] of moe_count; order i32 [tokens
// * top_k] and segments [max_segments] of moe_align. The order of the choices of one expert is unspecified;
// no result depends on it. Grid: one block per part of the choices. Block: a multiple of WARP_SIZE, at most
// 1024. Dynamic shared memory: count * 4 bytes. If there is only one part, moe_align counts the choices
// itself, and `counts` is null. With own = 1 segment e is the first segment of expert e, even if it has no
// rows, and all further segments follow; with own = 0 no segment is empty.
//
// moe_combine: y [tokens, h] = sum of weight * out[c] over a token's choices c on this rank, out [tokens *
// top_k, h], in ascending order of experts, in f32, rounded once; h is the hidden size. -DACT_F32=0|1: type
// of y. -DOUT_HALF=0|1: out is f32 or half_t; half_t requires h to be a multiple of 8.
// Grid: (tokens, h / columns of out in 256 * 16 bytes, rounded up). Block: 256. top_k is at most 64.
// Roofline: bytes of `out` over memory bandwidth.
#include "dev.h"
#include "dev/strip.h"
#include "moe/segment.h"
#include "sample/order.h"

// Calls visit(choice, expert) for every choice ((token, expert) pair) in the part of this block whose expert
// is on this rank. Several loads are in flight at a time.
template <class Visit> DEV void each_choice(const i32* experts, u32 choices, u32 first, u32 count, const Visit& visit) {
    enum : u32 { LOADS_IN_FLIGHT = 8 };
    const u32 part = (choices + gdim_x() - 1) / gdim_x(), begin = bid_x() * part;
    const u32 end = begin + part < choices ? begin + part : choices;
    for (u32 from = begin + tid(); from < end; from += LOADS_IN_FLIGHT * bdim()) {
        u32 e[LOADS_IN_FLIGHT];
        UNROLL for (u32 i = 0; i < LOADS_IN_FLIGHT; ++i) {
            const u32 c = from + i * bdim();
            e[i] = c < end ? (u32)experts[c] - first : count;
        }
        UNROLL for (u32 i = 0; i < LOADS_IN_FLIGHT; ++i)
            if (e[i] < count) visit(from + i * bdim(), e[i]);
    }
}
DEV void count_part(u32* counts, const i32* experts, u32 choices, u32 first, u32 count) {
    for (u32 e = tid(); e < count; e += bdim()) counts[e] = 0;
    sync();
    each_choice(experts, choices, first, count, [&](u32, u32 e) { atomic_add(counts + e, 1); });
    sync();
}

KERNEL(1024) moe_count(u32* counts, const i32* experts, u32 choices, u32 first, u32 count) {
    DYN_SHARED(u32, part);
    grid_wait();
    grid_launch_dependents();
    count_part(part, experts, choices, first, count);
    for (u32 e = tid(); e < count; e += bdim()) counts[bid_x() * count + e] = part[e];
}
EXPORT(moe_count)

// Number of choices ((token, expert) pairs) of one expert: in the parts before this block's part, and in all
// parts. Each block processes one part of the choices.
struct ExpertTokenCounts { u32 before, all; };
// Returns the numbers of choices of expert `e` in earlier parts and in all parts, from the counts that
// moe_count has written. `count`: number of experts of this rank.
DEV ExpertTokenCounts counted(const u32* counts, u32 e, u32 count) {
    ExpertTokenCounts c{0, 0};
    for (u32 part = 0; part < gdim_x(); ++part) {
        const u32 n = counts[part * count + e];
        c.before += part < bid_x() ? n : 0;
        c.all += n;
    }
    return c;
}

KERNEL(1024) moe_align(u32* order, ExpertSegment* segments, const u32* counts, const i32* experts, u32 choices,
                       u32 first, u32 count, u32 segment_rows, u32 max_segments, u32 own) {
    DYN_SHARED(u32, next);  // Per expert: index in `order` of its next choice.
    grid_launch_dependents();
    grid_wait();
    if (!counts) count_part(next, experts, choices, first, count);
    u32 at = 0, segment = own ? count : 0;
    for (u32 from = 0; from < count; from += bdim()) {
        const u32 e = from + tid();
        const ExpertTokenCounts mine = e >= count ? ExpertTokenCounts{0, 0} : counts ? counted(counts, e, count) : ExpertTokenCounts{0, next[e]};
        const u32 pieces = (mine.all + segment_rows - 1) / segment_rows, first_entries = own < pieces ? own : pieces;
        const PrefixSum rows = block_prefix(mine.all), cut = block_prefix(pieces - first_entries);
        if (e < count) next[e] = at + rows.before + mine.before;
        const u32 entries = e >= count ? 0 : own > pieces ? own : pieces;
        for (u32 i = 0; i < entries && bid_x() == 0; ++i) {
            const u32 done = i * segment_rows, left = mine.all - done;
            const u32 here = left < segment_rows ? left : segment_rows;
            segments[i < own ? e : segment + cut.before + i - own] = ExpertSegment{e, at + rows.before + done, here, 0};
        }
        at += rows.total;
        segment += cut.total;
    }
    if (bid_x() == 0)
        for (u32 i = segment + tid(); i < max_segments; i += bdim()) segments[i] = ExpertSegment{0, 0, 0, 0};
    sync();
    if (bid_x() == 0 && tid() == 0) segments[0].all = segment;
    each_choice(experts, choices, first, count, [&](u32 c, u32 e) { order[atomic_add(next + e, 1)] = c; });
}
EXPORT(moe_align)

#if OUT_HALF
typedef half_x8 Outs;
#else
typedef f32x4 Outs;
#endif
enum : u32 { WIDTH = OUT_HALF ? 8 : 4 };

KERNEL(256) moe_combine(ACT* y, const Outs* out, const i32* experts, const float* weights, u32 h, u32 top_k, u32 first,
                        u32 count, u32 y_stride) {
    enum : u32 { LOADS_IN_FLIGHT = 8 };
    SHARED(u32, chosen, 64);
    SHARED(float, routing_weight, 64);
    grid_launch_dependents();
    grid_wait();
    const u32 token = bid_x();
    if (tid() < top_k) {
        // Sorts the choices of the token by expert; choices of experts on other ranks come last.
        const u32 mine = (u32)experts[token * top_k + tid()] - first;
        u32 place = 0;
        for (u32 j = 0; j < top_k; ++j) {
            const u32 other = (u32)experts[token * top_k + j] - first;
            const bool ahead = mine < count ? other < mine : other < count || j < tid();
            place += ahead;
        }
        chosen[place] = mine < count ? token * top_k + tid() : ~0u;
        routing_weight[place] = weights[token * top_k + tid()];
    }
    sync();
    const u32 at = (bid_y() * bdim() + tid()) * WIDTH;
    if (at >= h) return;
    float sum[WIDTH];
    UNROLL for (u32 i = 0; i < WIDTH; ++i) sum[i] = 0.f;
    for (u32 from = 0; from < top_k; from += LOADS_IN_FLIGHT) {
        Outs x[LOADS_IN_FLIGHT];
        UNROLL for (u32 j = 0; j < LOADS_IN_FLIGHT; ++j)
            if (from + j < top_k && chosen[from + j] != ~0u) x[j] = out[((u64)chosen[from + j] * h + at) / WIDTH];
        UNROLL for (u32 j = 0; j < LOADS_IN_FLIGHT; ++j)
            if (from + j < top_k && chosen[from + j] != ~0u)
                UNROLL for (u32 i = 0; i < WIDTH; ++i) sum[i] = fma_(routing_weight[from + j], f32(x[j].v[i]), sum[i]);
    }
    UNROLL for (u32 i = 0; i < WIDTH; ++i) y[(u64)token * y_stride + at + i] = to<ACT>(sum[i]);
}
EXPORT(moe_combine)
