// moe_route.hip - MoE routing by softmax and top-k. CPU reference: cpu/route.rs.
//
// moe_route_softmax experts i32, weights f32 [tokens, k + shared]: the k largest of softmax(logits), in
// descending order, the lower index first among equal logits; then the shared experts, with ids from `count`
// on and weight 1. logits f32 [tokens, count], count <= 1024, k <= count. For each selected expert of a
// token, its entry of counts u32 [count] is incremented (null: no counting). Tokens whose KV slot in slots
// i64 [tokens] is negative are padding and are not counted (null: all tokens are counted).
// Grid: ceil(tokens / warps per block), a token per warp. Block: a multiple of WARP_SIZE. Experts are ordered by
// logits, not by rounded probabilities. Rounding: f32 throughout; additions in the order of route_softmax, whose bits
// the results have. Roofline: bytes of the logits over memory bandwidth; few tokens are bound by the latency of k
// successive maxima over a warp.
#include "dev.h"
#include "moe_route/moe_route.h"

// Routes a token whose logits are held by the lanes of a warp, expert i * WARP_SIZE + lane() in keys[i].
template <u32 VALUES>
DEV void route_warp(i32* experts, float* weights, u32* counts, const float* logits, u32 count, u32 k, bool normalise) {
    u32 keys[VALUES], unchosen = 0;  // sort keys; a bit for each expert that is left
    float most = -3.0e38f;
    UNROLL for (u32 i = 0; i < VALUES; ++i) {
        const u32 e = i * WARP_SIZE + lane();
        const float logit = e < count ? logits[e] : -3.0e38f;
        most = fmax_(most, logit);
        keys[i] = order_of(logit);
        unchosen |= u32(e < count) << i;
    }
    most = warp_max(most);
    const auto mass_of = [&](u32 key) { return exp2_((value_of(key) - most) * 1.44269504f); };
    float total = 0.f;
    UNROLL for (u32 i = 0; i < VALUES; ++i)
        if (i * WARP_SIZE < count) {
            const float part = warp_sum(unchosen >> i & 1 ? mass_of(keys[i]) : 0.f);
            total = i == 0 ? part : total + part;
        }
    float sum = 0.f;
    for (u32 j = 0; j < k; ++j) {
        u32 best = 0, at = VALUES;
        UNROLL for (u32 i = 0; i < VALUES; ++i) {
            const bool better = (unchosen >> i & 1) && (at == VALUES || keys[i] > best);
            best = better ? keys[i] : best;
            at = better ? i : at;
        }
        const u32 key = warp_max(best);
        const u32 id = id_of((u64)warp_max(at < VALUES && best == key ? 0xffffffffu - (at * WARP_SIZE + lane()) : 0u));
        const float p = mass_of(key) / total;
        sum += p;
        if (id % WARP_SIZE == lane()) unchosen &= ~(1u << at);
        if (j % WARP_SIZE != lane()) continue;
        experts[j] = (i32)id;
        weights[j] = p;
        if (counts) atomic_add(counts + id, 1u);
    }
    if (!normalise) return;
    for (u32 j = lane(); j < k; j += WARP_SIZE) weights[j] /= sum;
}

KERNEL(128)
moe_route_softmax(i32* experts, float* weights, const float* logits, u32 stride, u32 count, u32 k, u32 shared,
                  u32 normalise, u32 tokens, u32* counts, const i64* slots) {
    enum : u32 { FEW = 8 };
    grid_launch_dependents();
    grid_wait();
    const u64 token = (u64)bid_x() * (bdim() / WARP_SIZE) + warp_id();
    if (token >= tokens) return;
    const float* row = logits + token * stride;
    i32* chosen = experts + token * (k + shared);
    float* shares = weights + token * (k + shared);
    u32* counters = counters_of(counts, slots, token);
    if (count <= FEW * WARP_SIZE) route_warp<FEW>(chosen, shares, counters, row, count, k, normalise != 0);
    else route_warp<MAX_EXPERTS / WARP_SIZE>(chosen, shares, counters, row, count, k, normalise != 0);
    for (u32 i = lane(); i < shared; i += WARP_SIZE) {
        chosen[k + i] = (i32)(count + i);
        shares[k + i] = 1.f;
    }
}
EXPORT(moe_route_softmax)
