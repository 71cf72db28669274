// moe_fused_decode/gate_up.h - the gate and up projection for few choices ((token, expert) pairs). The strips
// (16 rows of W each) of all active experts form one list, and every block processes an equal number of
// consecutive strips; a pass may include strips of several experts. Each strip is multiplied by the rows of x
// of all tokens; results of tokens that are not routed to the expert of the strip are discarded.
#pragma once
#include "moe/bias.h"
#include "moe_fused_decode/sort_choices.h"
#include "moe_grouped_gemm_tma/roles.h"

// Iterates over the passes of a block. A pass multiplies strips (16 rows of W: gate and up of 8 outputs) of
// one or more experts by the rows of x of all tokens.
struct GateUpWork {
    const Weight* w;
#if FP8
    ExpertScales scaling;
#endif
    const ExpertSortedTokens* sorted;
    u32 n, k;
    u32 at, end, each;  // next and end strip of this block; strips per pass
    u64 policy;
    u32 rows, first, strips;
};
DEV GateUpWork gate_up_work_of_block(const Weight* w, const ExpertSortedTokens& sorted, u32 tokens, u32 n, u32 k) {
    const u64 all = (u64)sorted.all * (n / STRIP_LINES);
    const u32 at = (u32)(all * bid_x() / gdim_x()), end = (u32)(all * (bid_x() + 1) / gdim_x());
    const u32 passes = (end - at + STRIPS - 1) / STRIPS, each = passes ? (end - at + passes - 1) / passes : 0;
    GateUpWork m{};
    m.w = w, m.sorted = &sorted, m.n = n, m.k = k, m.at = at, m.end = end, m.each = each;
    m.policy = read_once(), m.rows = tokens;
    return m;
}
DEV bool next_pass(GateUpWork& m) {
    if (m.at >= m.end) return false;
    const u32 left = m.end - m.at;
    m.first = m.at;
    m.strips = left < m.each ? left : m.each;
    m.at += m.strips;
    return true;
}
DEV u32 row_of(const GateUpWork&, u32 r) { return r; }
DEV u32 columns_of(const GateUpWork& m) { return m.k; }
#if FP8
DEV const float* scales_of(const GateUpWork& m, u32 strip, u32 half) {
    const u32 of_expert = m.n / STRIP_LINES, at = m.first + strip;
    return scale_of(m.scaling, m.sorted->segments[at / of_expert].expert, at % of_expert, half, m.n, true);
}
#endif
DEV void copy_strips(const GateUpWork& m, u8* to, u32 block, Barrier* full) {
    enum : u32 { TILE_STRIPS = TILE_LINES / STRIP_LINES };
    const u32 of_expert = m.n / STRIP_LINES, strip = (m.first + lane()) % of_expert;
    if (lane() >= m.strips || (lane() > 0 && strip % TILE_STRIPS > 0)) return;
    // Number of strips of this pass, beginning with the strip of this lane, that are contiguous in memory:
    // one bulk copy loads them.
    u32 run = TILE_STRIPS - strip % TILE_STRIPS;
    if (run > of_expert - strip) run = of_expert - strip;
    if (run > m.strips - lane()) run = m.strips - lane();
    const u32 expert = m.sorted->segments[(m.first + lane()) / of_expert].expert;
    const Weight* from = m.w + expert * packed_size(m.n, m.k) + line_at(strip * STRIP_LINES, block, m.n, m.k);
    bulk_copy_once(to + lane() * STRIP_BYTES, from, run * STRIP_BYTES, full, m.policy);
}

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
