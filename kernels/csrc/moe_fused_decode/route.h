// moe_fused_decode/route.h - the choices ((token, expert) pairs) of all tokens: read from the output of a
// routing kernel or, with ROUTES, computed from the router logits, bit-identical to moe_route_softmax.
#pragma once
#include "moe_fused_decode/sort_choices.h"
#include "moe_route/moe_route.h"

// Routing of all tokens, from the arguments of the kernel: experts and weights, or router logits with
// ROUTES.
struct RoutingInputs {
    const i32* experts;    // [tokens, top_k], null with ROUTES
    const float* weights;
    const float* logits;   // [tokens, all], null without ROUTES
    u32 stride, all, normalise, shared;
    u32* counts;           // token counts per expert (moe_route/count.h); null unless this block counts
    const i64* slots;
};

// Determines the choices ((token, expert) pairs) of all tokens, and writes them to `sorted`, sorted by
// expert. May be called before grid_wait() only if its inputs are not outputs of the previous kernel. Every
// thread of the block must call it.
DEV void route_tokens(ExpertSortedTokens& sorted, const RoutingInputs& r, u32 choices, u32 first, u32 count,
                      u32 top_k) {
    u32 e = 0;
    float routing_weight = 0.f;
#if ROUTES
    enum : u32 { MOST_EXPERTS = 256 };
    SHARED(i32, experts, MOST_CHOICES);
    SHARED(float, weights, MOST_CHOICES);
    for (u32 from = 0; from < choices; from += top_k) {
        const float* row = r.logits + (u64)(from / top_k) * r.stride;
        const float logit = tid() < r.all ? as_f32(load_l2(row + tid())) : 0.f;
        u32* counts = counters_of(r.counts, r.slots, from / top_k);
        route_softmax<MOST_EXPERTS>(experts + from, weights + from, counts, logit, r.all, top_k - r.shared, r.shared,
                                    r.normalise != 0);
        sync();
    }
    if (tid() < choices) e = (u32)experts[tid()], routing_weight = weights[tid()];
#else
    if (tid() < choices) e = load_l2(r.experts + tid()), routing_weight = as_f32(load_l2(r.weights + tid()));
#endif
    sort_choices(sorted, e, routing_weight, choices, first, count, top_k);
}
