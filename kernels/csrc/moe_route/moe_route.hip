// moe_route.hip - MoE routing by softmax and top-k. CPU reference: cpu/route.rs.
//
// moe_route_softmax experts i32, weights f32 [tokens, k + shared]: the k largest of softmax(logits), in
// descending order, the lower index first among equal logits; then the shared experts, with ids from `count`
// on and weight 1. logits f32 [tokens, count], count <= 1024, k <= count. For each selected expert of a
// token, its entry of counts u32 [count] is incremented (null: no counting). Tokens whose KV slot in slots
// i64 [tokens] is negative are padding and are not counted (null: all tokens are counted). Grid: tokens.
// Block: count rounded up to a multiple of WARP_SIZE. Experts are ordered by logits, not by rounded
// probabilities. Rounding: f32 throughout. Roofline: latency (two block reductions and count / 4 shared
// reads); at 8192 tokens of 128 experts about 0.3 G comparisons, tens of microseconds.
#include "dev.h"
#include "moe_route/moe_route.h"

KERNEL(1024)
moe_route_softmax(i32* experts, float* weights, const float* logits, u32 stride, u32 count, u32 k, u32 shared,
                  u32 normalise, u32* counts, const i64* slots) {
    grid_launch_dependents();
    grid_wait();
    const u64 token = bid_x();
    const float logit = tid() < count ? logits[token * stride + tid()] : 0.f;
    const u64 at = token * (k + shared);
    route_softmax<MAX_EXPERTS>(experts + at, weights + at, counters_of(counts, slots, token), logit, count, k, shared,
                               normalise != 0);
}
EXPORT(moe_route_softmax)
