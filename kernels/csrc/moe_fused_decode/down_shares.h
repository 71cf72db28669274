// moe_fused_decode/down_shares.h - the down projection for few choices ((token, expert) pairs), divided equally among blocks.
// A warp stores the outputs of its strip for the choices of one expert; the warp that finishes the last expert of a strip
// sums the expert outputs of each token.
#pragma once
#include "moe/bias.h"
#include "moe_fused_decode/strip_list.h"

static_assert(!FP8 && GROUP_LINES == 64, "a warp has one strip, without block scales");

typedef StripListWork DownWork;
// Advances to the next pass. Its strips are of experts whose places (choices sorted by expert) fit into the rows of a tile
// together.
DEV bool next_pass(DownWork& m) {
    const u32 at = m.at, of_expert = m.n / STRIP_LINES;
    if (!next_strips(m)) return false;
    const ExpertSegment& first = m.sorted->segments[at / of_expert];
    u32 last = (m.at - 1) / of_expert;
    const auto rows_to = [&](u32 segment) { return m.sorted->segments[segment].first + m.sorted->segments[segment].rows - first.first; };
    while (last > at / of_expert && rows_to(last) > ROWS) --last;
    const u32 end = (last + 1) * of_expert;
    if (m.at > end) m.at = end, m.strips = end - at;
    m.first_row = first.first, m.rows = rows_to(last);
    return true;
}

// Expert outputs in scratch memory, and the number of finished experts of each strip.
struct StoredOutputs {
    float* outputs;  // [places, n]
    u32* finished;   // [n / STRIP_LINES], zero before and after the kernel
};

// Stores the outputs of one strip for the places of its expert. A lane has two outputs of two rows of each group of eight.
DEV void store_expert_outputs(const StoredOutputs& to, const float (&c)[ROWS / 2], const DownWork& m, const ExpertBiases& biases,
                              u32 strip) {
    const ExpertSegment s = segment_of(m, strip);
    const u32 out = strip % (m.n / STRIP_LINES) * STRIP_LINES + lane() / 4 * 2;
    const float low_bias = bias_of(biases, s.expert, out), high_bias = bias_of(biases, s.expert, out + 1);
    UNROLL for (u32 j = 0; j < ROWS / 8; ++j)
        UNROLL for (u32 i = 0; i < 2; ++i) {
            const u32 place = m.first_row + j * 8 + lane() % 4 * 2 + i;
            if (place - s.first >= s.rows) continue;
            *(f32x2*)(to.outputs + (u64)place * m.n + out) = f32x2{{add_bias(c[4 * j + i], low_bias), add_bias(c[4 * j + 2 + i], high_bias)}};
        }
}

// Stores, for 16 outputs from `from` on, the sum over the experts of each token of routing weight times expert output, added in
// ascending order of experts.
DEV void sum_strip(half_t* y, const StoredOutputs& of, const ExpertSortedTokens& sorted, u32 from, u32 n, u32 tokens, u32 top_k,
                   u32 y_stride) {
    enum : u32 { LOADS_IN_FLIGHT = 4 };
    for (u32 i = lane(); i < tokens * STRIP_LINES; i += WARP_SIZE) {
        const u32 token = i / STRIP_LINES, out = from + i % STRIP_LINES;
        const u32* places = sorted.places_of_token + token * top_k;
        float sum = 0.f;
        for (u32 j = 0; j < top_k; j += LOADS_IN_FLIGHT) {
            float value[LOADS_IN_FLIGHT];
            UNROLL for (u32 l = 0; l < LOADS_IN_FLIGHT; ++l)
                if (j + l < top_k && places[j + l] != NO_PLACE) value[l] = as_f32(load_l2(of.outputs + (u64)places[j + l] * n + out));
            UNROLL for (u32 l = 0; l < LOADS_IN_FLIGHT; ++l)
                if (j + l < top_k && places[j + l] != NO_PLACE) sum = fma_(sorted.routing_weight[places[j + l]], value[l], sum);
        }
        y[(u64)token * y_stride + out] = to_half(sum);
    }
}

// Stores the outputs of the strip of this warp, and their sums if all other experts of the strip are finished.
DEV void store_down(half_t* y, const StoredOutputs& to, const float (&c)[ROWS / 2], const DownWork& m, const ExpertBiases& biases,
                    u32 of_pass, u32 tokens, u32 top_k, u32 y_stride) {
    if (of_pass >= m.strips) return;
    const u32 strip = m.first + of_pass, of_expert = strip % (m.n / STRIP_LINES);
    store_expert_outputs(to, c, m, biases, strip);
    warp_sync();  // Orders the stores of all lanes before the atomic operation.
    u32 before = 0;
    if (lane() == 0) before = atomic_add_acq_rel(to.finished + of_expert, 1);
    if (shfl(before, 0) + 1 < m.sorted->all) return;
    warp_sync();  // Orders the atomic operation before the loads of all lanes.
    if (lane() == 0) to.finished[of_expert] = 0;
    sum_strip(y, to, *m.sorted, of_expert * STRIP_LINES, m.n, tokens, top_k, y_stride);
}

// Stores zeros for all tokens, of which none has an expert on this rank.
DEV void store_zeros(half_t* y, u32 tokens, u32 n, u32 y_stride) {
    for (u32 i = bid_x() * CONSUMER_THREADS + tid(); i < tokens * n; i += gdim_x() * CONSUMER_THREADS)
        y[(u64)(i / n) * y_stride + i % n] = to_half(0.f);
}
