// moe_route.h - expert selection for kernels that fuse it with the router GEMM; moe_route.hip gives the same bits.
#pragma once
#include "moe_route/count.h"
#include "moe_route/shared.h"
#include "sample/order.h"

enum : u32 { MAX_EXPERTS = 1024 };

// Routes one token: computes the softmax of its `count` logits, one per thread, and the k largest in
// descending order. Outputs: experts, weights [k + shared]. Among equal logits the lower index comes first.
// With `normalise` the first k weights are divided by their sum. The last `shared` entries are the shared
// experts, with ids from `count` on and weight 1. Unless `counts` is null, the counter of each of the k
// selected experts is incremented. Every thread of the block must call it. bdim() and MOST are at least
// `count`; MOST is a multiple of 4.
template <u32 MOST>
DEV void route_softmax(i32* experts, float* weights, u32* counts, float logit, u32 count, u32 k, u32 shared,
                       bool normalise) {
    SHARED(u32x4, keys, MOST / 4);
    SHARED(float, chosen, MOST);
    const u32 e = tid();
    const bool valid = e < count;
    const float most = block_max(valid ? logit : -3.0e38f);
    const float mass = valid ? exp2_((logit - most) * 1.44269504f) : 0.f;
    const float p = mass / block_sum(mass);
    const u32 key = valid ? order_of(logit) : 0;
    if (e < MOST) ((u32*)keys)[e] = key;
    sync();
    // The rank of an expert is the number of larger sort keys. Counting them in one loop avoids k successive
    // maximum reductions.
    u32 rank = 0;
    for (u32 j = 0; j < count; j += 4) {
        const u32x4 others = keys[j / 4];
        for (u32 i = 0; i < 4; ++i) rank += others.v[i] > key || (others.v[i] == key && j + i < e);
    }
    if (valid && rank < k) {
        chosen[rank] = p;
        experts[rank] = (i32)e;
        if (counts) atomic_add(counts + e, 1u);
    }
    add_shared(experts + k, weights + k, count, shared);
    sync();
    if (e >= k) return;
    float sum = 0.f;
    for (u32 j = 0; j < k; ++j) sum += chosen[j];
    weights[e] = normalise ? chosen[e] / sum : chosen[e];
}
