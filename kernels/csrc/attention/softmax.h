// attention/softmax.h - online softmax of the scores of a warpgroup: converts the scores, which are WGMMA
// accumulators (dev/wgmma.h), to probabilities, which are the register operand A of the next WGMMA.
#pragma once
#include "dev/wgmma.h"

// Score of masked keys: less than every real score, and finite, so that NO_SCORE - NO_SCORE is 0, not NaN.
#ifndef NO_SCORE
#  define NO_SCORE (-1e30f)
#endif

// Softmax state of the two query rows of a lane: maximum score, and sum of the probabilities of the keys
// whose scores are in this lane's registers.
struct SoftmaxRowState { float max[2], sum[2]; };

// Replaces the scores `s` of a key tile by probabilities; keys of a row from `seen` on are masked. `rescale`:
// output, the factor per row by which the sums and outputs of earlier tiles must be multiplied. `WINDOW`: all scores of
// a row may be NO_SCORE up to here; its probabilities are then 0.
template <bool MASKED, bool WINDOW = false, u32 SCORES>
DEV void online_softmax(float (&s)[SCORES], SoftmaxRowState& r, float (&rescale)[2], const u32 (&seen)[2],
                        float factor) {
    float max[2][2] = {{r.max[0], NO_SCORE}, {r.max[1], NO_SCORE}};
    UNROLL for (u32 i = 0; i < SCORES; ++i) {
        const u32 row = i >> 1 & 1;
        if (MASKED) s[i] = wgmma_col(i) < seen[row] ? s[i] : NO_SCORE;
        max[row][i & 1] = fmax_(max[row][i & 1], s[i]);
    }
    float least[2], sum[2] = {0.f, 0.f};
    UNROLL for (u32 row = 0; row < 2; ++row) {
        const float most = group_max<4>(fmax_(max[row][0], max[row][1]));
        rescale[row] = exp2_((r.max[row] - most) * factor);
        r.max[row] = most;
        least[row] = WINDOW && most == NO_SCORE ? 0.f : -most * factor;
    }
    UNROLL for (u32 i = 0; i < SCORES; ++i) {
        const u32 row = i >> 1 & 1;
        s[i] = exp2_(fma_(s[i], factor, least[row]));
        sum[row] += s[i];
    }
    UNROLL for (u32 row = 0; row < 2; ++row) r.sum[row] = fma_(r.sum[row], rescale[row], sum[row]);
}

// Masks the scores `s` of the keys of a tile before key first[row] of the tile, per row.
template <u32 SCORES> DEV void mask_first_scores(float (&s)[SCORES], const u32 (&first)[2]) {
    UNROLL for (u32 i = 0; i < SCORES; ++i)
        if (wgmma_col(i) < first[i >> 1 & 1]) s[i] = NO_SCORE;
}

// The probabilities in the registers of a lane, as the register operand A of WGMMA.
template <u32 SCORES> struct ProbabilityFragment { u32 v[SCORES / 8][4]; };

template <u32 SCORES> DEV void pack(ProbabilityFragment<SCORES>& p, const float (&s)[SCORES]) {
    UNROLL for (u32 i = 0; i < SCORES / 2; ++i) p.v[i / 4][i % 4] = pack_half(s[2 * i], s[2 * i + 1]);
}
