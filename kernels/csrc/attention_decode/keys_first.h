// attention_decode/keys_first.h - decode attention by one warp of 32 lanes for up to 8 queries: 16 keys are
// the rows (M) of the MMA, and queries are its columns (N). The interface is that of attention/warp.h; this
// version needs half as many MMAs and registers.
//
//   scores = K Qᵀ,     a lane has keys lane / 4 and + 8 of queries lane % 4 * 2 and + 1
//   out = Vᵀ Pᵀ,       a lane has channels channel_of(0) and (1) of every 16 channels, of queries lane % 4 *
//                      2 and + 1
//
// as_half.h and as_fp8.h define the MMA operands.
//
// `max` is raised to a query's maximum score only when a score exceeds it by more than SLACK: probabilities
// may grow to 2^SLACK, which costs no precision in f32, and the warp reduction of the maximum, otherwise
// needed at every tile, is rare. The scores of other queries do not affect a query's `max`: the bits of a
// token do not depend on the tokens that share its block.
#pragma once
#include "dev/strip.h"

enum : u32 { TILE_KEYS = 16, D = HEAD_DIM, SLOTS = 2, KEY_ROWS = 2 };
// Score of masked keys: less than every real score, and finite, so that NO_SCORE - NO_SCORE is 0, not NaN.
#define NO_SCORE (-1e30f)
#define SLACK 8.f

struct ValueOperand { u32x4 v[D / 16]; };  // 16 channels x 16 keys; a word has two keys of one channel
struct ScoreFragment { float v[SLOTS][KEY_ROWS]; };
// Online softmax state (maximum, sum) and accumulated outputs of a lane's queries.
struct SoftmaxState {
    float max[SLOTS], sum[SLOTS];  // sum of probabilities: of this lane's own keys until finish()
    f32x4 out[D / 16];
};

DEV u32 query_of(u32 slot) { return (lane() & 3) * 2 + slot; }
DEV u32 key_row(u32 i) { return (lane() >> 2) + i * 8; }

DEV void start(SoftmaxState& r) {
    UNROLL for (u32 i = 0; i < SLOTS; ++i) {
        r.max[i] = NO_SCORE;
        r.sum[i] = 0.f;
    }
    UNROLL for (u32 i = 0; i < D / 16; ++i) r.out[i] = f32x4{{0.f, 0.f, 0.f, 0.f}};
}

// The vectors of the queries of a lane as an MMA operand; vector i has channels [32 i + strip_k(), 32 i + strip_k() + 8).
#if HEAD_DIM > 256
// With heads of 512 channels a lane has no registers for them in addition to the outputs: they are in shared memory, where
// no other lane accesses them.
template <class Vector> struct QueryVectors {};
DEV u32x4* own_query_vectors() {
    SHARED(u32x4, vectors, 2 * D / 32 * WARP_SIZE);  // A block has two warps.
    return vectors + warp_id() * (D / 32) * WARP_SIZE + lane();
}
template <class Vector> DEV void set_query_vector(QueryVectors<Vector>&, u32 i, const Vector& vector) {
    own_query_vectors()[i * WARP_SIZE] = bits_as<u32x4>(vector);
}
template <class Vector> DEV Vector query_vector(const QueryVectors<Vector>&, u32 i) {
    return bits_as<Vector>(own_query_vectors()[i * WARP_SIZE]);
}
#else
template <class Vector> struct QueryVectors { Vector v[D / 32]; };
template <class Vector> DEV void set_query_vector(QueryVectors<Vector>& q, u32 i, const Vector& vector) { q.v[i] = vector; }
template <class Vector> DEV Vector query_vector(const QueryVectors<Vector>& q, u32 i) { return q.v[i]; }
#endif

#if KV_FP8
#  include "attention_decode/as_fp8.h"
#else
#  include "attention_decode/as_half.h"
#endif

DEV ScoreFragment score(const QueryOperand& q, const KeyOperand& k) {
    f32x4 c[2] = {{{0.f, 0.f, 0.f, 0.f}}, {{0.f, 0.f, 0.f, 0.f}}};
    UNROLL for (u32 i = 0; i < D / 32; ++i) score_channels(c[i & 1], q, k, i);
    ScoreFragment s;
    UNROLL for (u32 i = 0; i < SLOTS; ++i)
        UNROLL for (u32 j = 0; j < KEY_ROWS; ++j) s.v[i][j] = (c[0].v[j * 2 + i] + c[1].v[j * 2 + i]) * score_factor(q, i);
    return s;
}

// Transposes an 8x8 matrix of 16-bit values, of which each lane has two adjacent values of a row in one word.
DEV u32 transpose_8x8(u32 v) {
#if DEV_NV
    u32 r;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
    return r;
#else
    const u32 column = lane() >> 2, from = (lane() & 3) * 8 + column / 2;
    const u32 a = shfl(v, from), b = shfl(v, from + 4), half = column % 2 * 16;
    return (a >> half & 0xffff) | (b >> half & 0xffff) << 16;
#endif
}

DEV void rescale(SoftmaxState& r, const ScoreFragment& s) {
    UNROLL for (u32 i = 0; i < SLOTS; ++i) {
        float max = fmax_(s.v[i][0], s.v[i][1]);
        for (u32 mask = 4; mask < 32; mask *= 2) max = fmax_(max, shfl_xor(max, mask));
        max = max > r.max[i] + SLACK ? max : r.max[i];
        const float factor = exp2_(r.max[i] - max);
        r.max[i] = max;
        r.sum[i] *= factor;
        UNROLL for (u32 j = 0; j < D / 16; ++j)
            UNROLL for (u32 e = i; e < 4; e += 2) r.out[j].v[e] *= factor;
    }
}

// Replaces scores by probabilities. Query i of the lane attends to keys [0, seen[i]) of the tile. `factor`:
// softmax scale * log2(e). If a query attends to no key of a split, its probabilities are arbitrary: its
// maximum is NO_SCORE, so its partial result has weight zero when the splits are merged.
DEV void online_softmax(SoftmaxState& r, ScoreFragment& s, const u32 (&seen)[SLOTS], float factor) {
    bool grows = false;
    UNROLL for (u32 i = 0; i < SLOTS; ++i)
        UNROLL for (u32 j = 0; j < KEY_ROWS; ++j) {
            s.v[i][j] = key_row(j) < seen[i] ? s.v[i][j] * factor : NO_SCORE;
            grows |= s.v[i][j] > r.max[i] + SLACK;
        }
    if (warp_any(grows)) rescale(r, s);
    UNROLL for (u32 i = 0; i < SLOTS; ++i) {
        UNROLL for (u32 j = 0; j < KEY_ROWS; ++j) s.v[i][j] = exp2_(s.v[i][j] - r.max[i]);
        r.sum[i] += s.v[i][0] + s.v[i][1];
    }
}

// The probabilities of a tile as the operand B of the MMA with the values.
struct ProbabilityWords { u32 v[2]; };
DEV ProbabilityWords probability_words(const ScoreFragment& p) {
    return ProbabilityWords{{transpose_8x8(pack_weights(p.v[0][0], p.v[1][0])), transpose_8x8(pack_weights(p.v[0][1], p.v[1][1]))}};
}

// Adds the products of the probabilities and the values of a tile to the outputs r.out.
DEV void add_values(SoftmaxState& r, const ScoreFragment& p, const ValueOperand& v) {
    const ProbabilityWords b = probability_words(p);
    UNROLL for (u32 j = 0; j < D / 16; ++j) mma_values(r.out[j], v.v[j], b.v[0], b.v[1]);
}

// Replaces the sum of probabilities of each query by its total over the lanes that have keys of that query;
// called after the last tile.
DEV void finish(SoftmaxState& r) {
    UNROLL for (u32 i = 0; i < SLOTS; ++i)
        for (u32 mask = 4; mask < 32; mask *= 2) r.sum[i] += shfl_xor(r.sum[i], mask);
}

// Whether this lane stores the softmax maximum and sum of its queries: true on one lane per query.
DEV bool is_query_leader() { return lane() < 4; }
// Calls put(query, channel, value) for each attention output that this lane has in registers.
template <class Put> DEV void each_output(const SoftmaxState& r, const Put& put) {
    UNROLL for (u32 j = 0; j < D / 16; ++j)
        UNROLL for (u32 e = 0; e < 4; ++e) put(query_of(e & 1), j * 16 + channel_of(e >> 1), r.out[j].v[e]);
}
