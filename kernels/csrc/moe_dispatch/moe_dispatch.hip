// moe_dispatch.hip - expert parallel (EP) dispatch and combine: choosing a replica of each expert (EPLB),
// listing the tokens of each rank, and adding the rows that ranks return. CPU reference: cpu/moe.rs
// (`ExpertPlacementLookup`), cpu/moe_dispatch.rs.
//
// eplb_map_experts   maps logical experts to physical replicas, in place on experts i32 [rows, k]. The
//                    token's position selects the replica. Row i is that of token tokens[i], or token i if
//                    `tokens` is null; positions i32 by token. places [logical experts, 1 + maximum
//                    replicas]: number of replicas, then their physical ids. The result is -1 for tokens or
//                    experts that do not exist. Grid: choices / block, rounded up. Block: 256.
// moe_dispatch       lists the tokens of each rank, from experts i32 [t tokens, k]. Outputs: tokens i32
//                    [ranks * t], the tokens for rank 0 in ascending order, then those for rank 1, and so on;
//                    places i32 [t, ranks], the index in `tokens` of a token for a rank, or -1; counts i32
//                    [ranks]. Rank r has `experts_per_rank` experts, the first of which is (r * stride +
//                    offset) * experts_per_rank. At most 64 ranks. Grid: ranks. Block: a multiple of
//                    WARP_SIZE up to 1024. Every block scans all choices twice.
// moe_combine_ranks  y [tokens, cols] = sum of the rows of x [rows, cols] with indices places i32 [tokens,
//                    n], added in that order in f32 from zero on, rounded once. Indices out of range are
//                    skipped. x and y are of ACT. Grid: tokens * parts blocks, where block b processes part b
//                    % parts of token b / parts. Block: a multiple of WARP_SIZE up to 256, eight columns per
//                    thread.
// Roofline: moe_combine_ranks is bound by its bytes over memory bandwidth; the other kernels are
// latency-bound.
#include "dev.h"
#include "sample/order.h"

KERNEL(256) eplb_map_experts(i32* experts, const i32* positions, const i32* tokens, const i32* places, u32 choices, u32 k,
                             u32 known, u32 count, u32 width) {
    grid_wait();
    grid_launch_dependents();
    const u32 c = bid_x() * bdim() + tid();
    if (c >= choices) return;
    const u32 token = tokens ? (u32)tokens[c / k] : c / k, expert = (u32)experts[c];
    i32 place = -1;
    if (token < known && expert < count) {
        const i32* row = places + (u64)expert * width;
        const u32 at = positions[token] > 0 ? (u32)positions[token] : 0u, copies = row[0] > 0 ? (u32)row[0] : 1u;
        place = row[1 + at % copies];
    }
    experts[c] = place;
}
EXPORT(eplb_map_experts)

// Placement of experts on ranks: rank r has experts_per_rank experts, from (r * stride + offset) *
// experts_per_rank on.
struct ExpertParallelLayout {
    u32 experts_per_rank, ranks, stride, offset;
};
// Returns the ranks to which a token is sent, as a bit mask. `experts`: the k selected experts of the token.
DEV u64 ranks_of(const i32* experts, u32 k, ExpertParallelLayout layout) {
    u64 ranks = 0;
    for (u32 j = 0; j < k; ++j) {
        const i32 expert = experts[j];
        const u32 holder = (u32)expert / layout.experts_per_rank, rank = holder / layout.stride;
        if (expert >= 0 && holder % layout.stride == layout.offset && rank < layout.ranks) ranks |= (u64)1 << rank;
    }
    return ranks;
}
DEV u32 popcount(u64 bits) {
    u32 n = 0;
    for (; bits; bits &= bits - 1) ++n;
    return n;
}

KERNEL(1024) moe_dispatch(i32* tokens, i32* places, i32* counts, const i32* experts, u32 t, u32 k, u32 experts_per_rank, u32 ranks,
                          u32 stride, u32 offset, u32 experts_stride, u32 places_stride) {
    grid_wait();
    grid_launch_dependents();
    const ExpertParallelLayout layout{experts_per_rank, ranks, stride, offset};
    const u32 rank = bid_x();
    const u64 own = (u64)1 << rank;
    u32 ahead = 0;
    for (u32 i = tid(); i < t; i += bdim())
        ahead += popcount(ranks_of(experts + (u64)i * experts_stride, k, layout) & (own - 1));
    u32 next = block_prefix(ahead).total;
    const u32 begin = next;
    for (u32 from = 0; from < t; from += bdim()) {
        const u32 i = from + tid();
        const bool received = i < t && (ranks_of(experts + (u64)i * experts_stride, k, layout) & own) != 0;
        const PrefixSum before = block_prefix(received);
        if (received) tokens[next + before.before] = (i32)i;
        if (i < t) places[(u64)i * places_stride + rank] = received ? (i32)(next + before.before) : -1;
        next += before.total;
    }
    if (tid() == 0) counts[rank] = (i32)(next - begin);
}
EXPORT(moe_dispatch)

KERNEL(256) moe_combine_ranks(ACT* y, const ACT* x, const i32* places, u32 cols, u32 parts, u32 n, u32 rows, u32 y_stride,
                              u32 x_stride, u32 places_stride) {
    grid_wait();
    grid_launch_dependents();
    const u64 token = bid_x() / parts;
    const i32* named = places + token * places_stride;
    ACT* to_row = y + token * y_stride;
    const u32 first = bid_x() % parts * bdim() + tid(), step = parts * bdim();
    const bool aligned = (((u64)y | (u64)x | y_stride * sizeof(ACT) | x_stride * sizeof(ACT)) & 15) == 0;
    if (aligned && cols % 8 == 0) {
        for (u32 c = first * 8; c < cols; c += step * 8) {
            f32x8 sum{};
            for (u32 j = 0; j < n; ++j) {
                if ((u32)named[j] >= rows) continue;
                const f32x8 v = load8(x + (u64)named[j] * x_stride + c);
                for (u32 i = 0; i < 8; ++i) sum.v[i] += v.v[i];
            }
            store8(to_row + c, sum);
        }
    } else {
        for (u32 c = first; c < cols; c += step) {
            float sum = 0.f;
            for (u32 j = 0; j < n; ++j)
                if ((u32)named[j] < rows) sum += f32(x[(u64)named[j] * x_stride + c]);
            to_row[c] = to<ACT>(sum);
        }
    }
}
EXPORT(moe_combine_ranks)
