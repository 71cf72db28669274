// moe_fused_decode/gate_up.h - the gate and up projection for few choices ((token, expert) pairs). Each strip is
// multiplied by the rows of x of all tokens; results of tokens that are not routed to the expert of the strip are
// discarded.
#pragma once
#include "moe/bias.h"
#include "moe_fused_decode/strip_list.h"

typedef StripListWork GateUpWork;
DEV GateUpWork gate_up_work_of_block(const Weight* w, const ExpertSortedTokens& sorted, u32 tokens, u32 n, u32 k) {
    GateUpWork m = strips_of_block(w, sorted, n, k);
    m.rows = tokens;
    return m;
}
DEV bool next_pass(GateUpWork& m) { return next_strips(m); }
#if FP8
DEV const float* scales_of(const GateUpWork& m, u32 strip, u32 half) {
    const u32 of_expert = m.n / STRIP_LINES, at = m.first + strip;
    return scale_of(m.scaling, m.sorted->segments[at / of_expert].expert, at % of_expert, half, m.n, true);
}
#endif

// Stores gated(gate, up) for one strip to the rows of y of the places (choices sorted by expert) of its
// expert. A lane has gate and up of one output, for two tokens of each group of eight.
DEV void store_gate_up(half_t* y, const float (&c)[ROWS / 2], const GateUpWork& m, const ExpertBiases& biases,
                       u32 of_pass, u32 y_stride) {
    const u32 of_expert = m.n / STRIP_LINES, strip = m.first + of_pass;
    if (of_pass >= m.strips) return;
    const ExpertSegment s = m.sorted->segments[strip / of_expert];
    const u32 out = strip % of_expert * 8 + lane() / 4;
    const float gate_bias = bias_of(biases, s.expert, out), up_bias = bias_of(biases, s.expert, biases.n / 2 + out);
    UNROLL for (u32 j = 0; j < ROWS / 8; ++j) {
        if (j * 8 >= m.rows) break;
        UNROLL for (u32 i = 0; i < 2; ++i) {
            const u32 token = j * 8 + lane() % 4 * 2 + i;
            const half_t value = to_half(gated(add_bias(c[4 * j + i], gate_bias), add_bias(c[4 * j + 2 + i], up_bias)));
            for (u32 place = s.first; place < s.first + s.rows; ++place)
                if (m.sorted->token[place] == token) y[(u64)place * y_stride + out] = value;
        }
    }
}
