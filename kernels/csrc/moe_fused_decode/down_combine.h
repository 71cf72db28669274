// moe_fused_decode/down_combine.h - the down projection for few choices. For each of its strips of outputs a
// block multiplies the weight lines of all active experts, so that the block can sum the expert outputs of
// each token.
#pragma once
#include "moe_fused_decode/sort_choices.h"
#include "moe_grouped_gemm_tma/roles.h"

// Iterates over a block's passes. A pass multiplies one strip of outputs, of up to STRIPS experts, by the
// rows of all places (sort_choices.h).
struct DownCombineWork {
    const Weight* w;
#if FP8
    ExpertScales scaling;
#endif
    const ExpertSortedTokens* sorted;
    u32 n, k;
    u32 strip, end;  // current strip of outputs; end of the block's strips
    u32 segment;     // first segment (expert) of the pass
    u64 policy;
    u32 rows, strips;
};
DEV DownCombineWork down_work_of_block(const Weight* w, const ExpertSortedTokens& sorted, u32 n, u32 k) {
    const u64 all = n / STRIP_LINES;
    const u32 at = (u32)(all * bid_x() / gdim_x()), end = (u32)(all * (bid_x() + 1) / gdim_x());
    // Starts in the state after the last pass of the previous strip, so that next_pass() begins with the
    // block's first strip.
    DownCombineWork b{};
    b.w = w, b.sorted = &sorted, b.n = n, b.k = k, b.strip = at - 1, b.end = end, b.segment = sorted.all;
    b.policy = read_once(), b.rows = sorted.places;
    return b;
}
DEV bool is_last_of_strip(const DownCombineWork& b) { return b.segment + b.strips >= b.sorted->all; }
DEV bool next_pass(DownCombineWork& b) {
    b.segment += b.strips;
    if (b.segment >= b.sorted->all) {
        b.segment = 0;
        if (++b.strip >= b.end) return false;
    }
    const u32 left = b.sorted->all - b.segment;
    b.strips = left < STRIPS ? left : (u32)STRIPS;
    return true;
}
DEV u32 row_of(const DownCombineWork&, u32 r) { return r; }
DEV u32 columns_of(const DownCombineWork& b) { return b.k; }
#if FP8
DEV const float* scales_of(const DownCombineWork& b, u32 strip, u32 half) {
    return scale_of(b.scaling, b.sorted->segments[b.segment + strip].expert, b.strip, half, b.n, false);
}
#endif
DEV void copy_strips(const DownCombineWork& b, u8* to, u32 block, Barrier* full) {
    if (lane() >= b.strips) return;
    const Weight* expert = b.w + (u64)b.sorted->segments[b.segment + lane()].expert * b.n * b.k;
    const Weight* from = expert + line_at(b.strip * STRIP_LINES, block, b.n, b.k);
    bulk_copy_once(to + lane() * STRIP_BYTES, from, STRIP_BYTES, full, b.policy);
}

// For each place, the outputs of its expert in the current strip; written two outputs at a time.
struct alignas(f32x2) ExpertOutputs { float v[MOST_CHOICES][STRIP_LINES]; };

// Stores the expert outputs of a strip of one expert: of the products with the rows of all places, only those
// of the expert's own places.
DEV void accumulate_output(ExpertOutputs& expert_outputs, const float (&c)[ROWS / 2], const DownCombineWork& b,
                           u32 strip) {
    if (strip >= b.strips) return;
    const ExpertSegment s = b.sorted->segments[b.segment + strip];
    UNROLL for (u32 j = 0; j < ROWS / 8; ++j)
        UNROLL for (u32 i = 0; i < 2; ++i) {
            const u32 place = j * 8 + lane() % 4 * 2 + i;
            if (place - s.first < s.rows)
                *(f32x2*)(expert_outputs.v[place] + lane() / 4 * 2) = f32x2{{c[4 * j + i], c[4 * j + 2 + i]}};
        }
}

// Stores the weighted sums of the strip's outputs; a token's experts are added in ascending order.
DEV void store_combined(half_t* y, const ExpertOutputs& expert_outputs, const DownCombineWork& b, u32 tokens,
                        u32 y_stride) {
    for (u32 i = tid(); i < tokens * STRIP_LINES; i += CONSUMER_THREADS) {
        const u32 token = i / STRIP_LINES, out = i % STRIP_LINES;
        float sum = 0.f;
        for (u32 place = 0; place < b.rows; ++place)
            if (b.sorted->token[place] == token) sum = fma_(b.sorted->routing_weight[place], expert_outputs.v[place][out], sum);
        y[(u64)token * y_stride + b.strip * STRIP_LINES + out] = to_half(sum);
    }
}
