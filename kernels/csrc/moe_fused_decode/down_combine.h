// moe_fused_decode/down_combine.h - the down projection for few choices ((token, expert) pairs). A block
// computes a strip of 16 outputs for all active experts, so that it can sum the expert outputs of each token
// itself.
#pragma once
#include "moe/bias.h"
#include "moe_fused_decode/sort_choices.h"
#include "moe_grouped_gemm_tma/roles.h"

// Iterates over the passes of a block. A pass multiplies the weights of one strip (16 outputs) of up to
// STRIPS experts by the activations of all places. A place is an index in the choices sorted by expert
// (sort_choices.h).
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
    // The initial state is that after the last pass of the strip before the first strip of this block, so
    // that the first call of next_pass() begins with the first strip.
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
    const Weight* expert = b.w + b.sorted->segments[b.segment + lane()].expert * packed_size(b.n, b.k);
    const Weight* from = expert + line_at(b.strip * STRIP_LINES, block, b.n, b.k);
    bulk_copy_once(to + lane() * STRIP_BYTES, from, STRIP_BYTES, full, b.policy);
}

// Expert outputs of the current strip (16 outputs) for each place (choice sorted by expert). A lane writes
// two outputs at a time.
struct alignas(f32x2) ExpertOutputs { float v[MOST_CHOICES][STRIP_LINES]; };

// Stores the outputs of one expert for the current strip. The products `c` are with the activations of all
// places (choices sorted by expert); only those of the places of this expert are stored.
DEV void accumulate_output(ExpertOutputs& expert_outputs, const float (&c)[ROWS / 2], const DownCombineWork& b,
                           const ExpertBiases& biases, u32 strip) {
    if (strip >= b.strips) return;
    const ExpertSegment s = b.sorted->segments[b.segment + strip];
    const u32 out = b.strip * STRIP_LINES + lane() / 4 * 2;
    const float low_bias = bias_of(biases, s.expert, out), high_bias = bias_of(biases, s.expert, out + 1);
    UNROLL for (u32 j = 0; j < ROWS / 8; ++j)
        UNROLL for (u32 i = 0; i < 2; ++i) {
            const u32 place = j * 8 + lane() % 4 * 2 + i;
            if (place - s.first < s.rows)
                *(f32x2*)(expert_outputs.v[place] + lane() / 4 * 2) = f32x2{{add_bias(c[4 * j + i], low_bias), add_bias(c[4 * j + 2 + i], high_bias)}};
        }
}

// Stores, for the current strip of outputs, the sum over the experts of each token of routing weight times
// expert output, added in ascending order of experts.
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
