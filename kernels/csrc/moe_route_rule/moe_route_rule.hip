// moe_route_rule.hip - MoE routing by configurable rule (sigmoid or softmax, bias, groups). CPU reference:
// cpu/route.rs.
//
// moe_route outputs experts i32, weights f32 [tokens, k + shared], best expert first. Scores are
// softmax(logits) or, with `sigmoid`, sigmoid(logits). Experts are selected by their choice values, score +
// bias (bias f32 [count], or null). With groups > 0 the experts form that number of equal groups: a token
// chooses among the experts of the `kept` best groups. Groups are ranked by their largest choice value or,
// with `two_largest`, by the sum of the two largest. Among equals the lower index is first. A weight is the
// expert's score, divided by the sum of the chosen scores if `normalise`, times `scale`. The k experts are
// followed by the shared experts, with ids from `count` on and weight 1. counts, slots: see moe_route.hip.
// logits f32 [tokens, count], count <= 1024, k <= experts of the kept groups. Grid: tokens. Block: count
// rounded up to a multiple of WARP_SIZE. Rounding: f32 throughout; choice values are compared unrounded.
// Roofline: latency, as moe_route_softmax; grouping adds one pass over a group's experts per group.
#include "dev.h"
#include "moe_route/count.h"
#include "moe_route/shared.h"
#include "sample/order.h"

enum : u32 { MOST_EXPERTS = 1024 };
// Added to the sum of the selected scores before the weights are divided by it, because all sigmoid scores
// may be 0.
#define LEAST_SUM 1e-20f

// Group-limited selection: number of groups, number of kept groups, and whether a group is ranked by the sum
// of its two largest choice values.
struct ExpertGroupRule { u32 count, kept, two_largest; };

// Returns the score of a group of `each` experts: the largest of their choice values `c` (score + bias), or
// the sum of the two largest if `two` is true.
DEV float group_score(const float* c, u32 each, bool two) {
    float first = c[0], second = -3.0e38f;
    for (u32 i = 1; i < each; ++i) {
        second = fmax_(second, fmin_(first, c[i]));
        first = fmax_(first, c[i]);
    }
    return two ? first + second : first;
}

// Returns the rank, from 0, of keys[own] in descending order of the `n` keys: the number of larger keys plus
// the number of equal keys with a lower index.
DEV u32 rank_of(const u32* keys, u32 n, u32 own) {
    const u32 key = keys[own];
    u32 rank = 0;
    for (u32 j = 0; j < n; ++j) rank += keys[j] > key || (keys[j] == key && j < own);
    return rank;
}

// Whether the expert of this thread (expert tid()) is in one of the best groups.
DEV bool in_kept_group(const float* choices, u32* keys, u32 count, const ExpertGroupRule& groups) {
    const u32 each = count / groups.count;
    if (tid() < groups.count) keys[tid()] = order_of(group_score(choices + tid() * each, each, groups.two_largest != 0));
    sync();
    const bool kept = tid() < count && rank_of(keys, groups.count, tid() / each) < groups.kept;
    sync();
    return kept;
}

KERNEL(1024)
moe_route(i32* experts, float* weights, const float* logits, u32 stride, const float* bias, u32 count, u32 k, u32 shared,
          u32 sigmoid, u32 groups, u32 kept, u32 two_largest, u32 normalise, float scale, u32* counts, const i64* slots) {
    SHARED(u32, keys, MOST_EXPERTS);
    SHARED(float, choices, MOST_EXPERTS);
    SHARED(float, chosen, MOST_EXPERTS);
    grid_launch_dependents();
    grid_wait();
    const u64 token = bid_x(), at = token * (k + shared);
    const u32 e = tid();
    add_shared(experts + at + k, weights + at + k, count, shared);
    bool valid = e < count;
    const float logit = valid ? logits[token * stride + e] : -3.0e38f;
    float score;
    if (sigmoid) {
        score = 1.f / (1.f + exp2_(-1.44269504f * logit));
    } else {
        const float most = block_max(logit);
        const float mass = valid ? exp2_((logit - most) * 1.44269504f) : 0.f;
        score = mass / block_sum(mass);
    }
    const float choice = score + (bias && valid ? bias[e] : 0.f);
    if (valid) choices[e] = choice;
    sync();
    if (groups) valid = in_kept_group(choices, keys, count, ExpertGroupRule{groups, kept, two_largest});
    if (e < count) keys[e] = valid ? order_of(choice) : 0;
    sync();
    const u32 rank = valid ? rank_of(keys, count, e) : count;
    if (rank < k) {
        chosen[rank] = score;
        experts[at + rank] = (i32)e;
        if (u32* counters = counters_of(counts, slots, token)) atomic_add(counters + e, 1u);
    }
    sync();
    if (e >= k) return;
    float sum = LEAST_SUM;
    for (u32 j = 0; j < k; ++j) sum += chosen[j];
    weights[at + e] = (normalise ? chosen[e] / sum : chosen[e]) * scale;
}
EXPORT(moe_route)
