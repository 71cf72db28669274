// attention/warp.h - one warp's part of attention: 16 queries of one KV head times 16 consecutive keys at a
// time, with an online softmax. Keys and values go from the KV pool to the MMA in their memory layout, rows
// of 16-byte pieces: no shared memory, no shuffle. Warps of 32 and of 64 lanes have different fragment
// layouts, but the same interface:
//
//   warp 32: scores = Q Kᵀ,   a lane has queries lane / 4 and lane / 4 + 8; out = P V, where P has the layout
//                           of the scores.
//   warp 64: scores = K Qᵀ,   a lane has query lane % 16;                   out = Vᵀ Pᵀ, where Pᵀ has the
//                           layout of the scores.
//
// Probabilities are rounded to half_t before the multiplication by the values; their sum is taken before
// rounding. Scores, maxima, sums and outputs are f32. Maxima are in units of log2(e).
//
// CHANNEL_WARPS: number of warps that share the channels of 16 queries, because a warp of 32 lanes has registers for
// queries and outputs of 256 channels. Scores are then partial sums over OWN_D channels; addresses of queries, keys and
// values are those of the warp's first channel.
//
// -DHEAD_DIM=64|128|256|512; -DKV_FP8=1: the KV pool is fp8 e4m3. -DQUERY_DIM=n: head dim of queries and keys if it
// is larger than that of values (as in MLA), a multiple of 32.
#pragma once
#include "dev/strip.h"

#ifndef KV_FP8
#  define KV_FP8 0
#endif
#if KV_FP8
typedef fp8 KV;
#else
typedef half_t KV;
#endif

#ifndef QUERY_DIM
#  define QUERY_DIM HEAD_DIM
#endif
#define CHANNEL_WARPS (WARP_SIZE == 32 && HEAD_DIM > 256 ? 2 : 1)
enum : u32 {
    TILE_KEYS = 16, QUERIES = 16, D = HEAD_DIM,
    OWN_D = D / CHANNEL_WARPS,  // output channels of a warp
    QUERY_PARTS = QUERY_DIM / 32 / CHANNEL_WARPS
};
// Score of masked keys: less than every real score, and finite, so that NO_SCORE - NO_SCORE is 0, not NaN.
#define NO_SCORE (-1e30f)

// Loads eight consecutive elements of the KV pool (keys or values) as half_t.
#if KV_FP8
DEV half_x8 load_kv8(const KV* p) { return widen_half(*(const fp8x8*)p); }
#else
DEV half_x8 load_kv8(const KV* p) { return *(const half_x8*)p; }
#endif

#if WARP_SIZE == 64 && HEAD_DIM == 64
// Loads four consecutive elements of the KV pool as half_t.
#  if KV_FP8
DEV half_x4 load_kv4(const KV* p) {
    struct WordPair { u32 v[2]; };
    const u32 word = bits_as<u32>(*(const fp8x4*)p);
    return bits_as<half_x4>(WordPair{{pack_exact(unpack_fp8_of<false>(word)), pack_exact(unpack_fp8_of<true>(word))}});
}
#  else
DEV half_x4 load_kv4(const KV* p) { return *(const half_x4*)p; }
#  endif
#endif

#if WARP_SIZE == 64
enum : u32 {
    SLOTS = 1,           // number of queries per lane
    KEYS = 4,            // scores per lane and query
    KEY_ROWS = 1,        // keys of which a lane loads pieces
    PART = D / 16,       // consecutive output channels in a run
    PARTS = 4,           // runs of PART output channels per lane
    SUMS = D / 16,       // accumulators, of 4 elements each
    // Elements after each row of keys and of values in shared memory, so that the lanes that a read of MI300X or MI355X
    // serves together (emu/isa/lds_banks.h) are in different banks. Two conflicts remain: fp8 keys of MI300X, and 16-bit
    // values of heads of 256 channels.
    KEY_PADDING = 16,
    VALUE_PADDING = PART * sizeof(KV) >= 16 ? 0 : 4 * PART
};
DEV u32 query_of(u32) { return lane() & 15; }
DEV u32 key_of(u32 i) { return (lane() >> 4) * 4 + i; }
DEV u32 key_row(u32) { return lane() & 15; }
// A lane has PARTS runs of PART consecutive output channels. For run p: part_slot() returns the index of its
// query among the lane's queries, part_channel() its first channel; PART_VALUE is channel j of the run.
DEV u32 part_slot(u32) { return 0; }
DEV u32 part_channel(u32 p) { return ((lane() >> 4) * 4 + p) * PART; }
#  define PART_VALUE(o, p, j) (o)[j].v[p]
#  define SLOT_OF_SUM(e) 0
DEV float over_keys_max(float v) {
    v = fmax_(v, shfl_xor(v, 16));
    return fmax_(v, shfl_xor(v, 32));
}
DEV float over_keys_sum(float v) {
    v += shfl_xor(v, 16);
    return v + shfl_xor(v, 32);
}
// Registers of a lane for the values of a tile as an operand of MFMA (warps of 64 lanes).
struct ValueOperand { half_t v[KEYS][PART]; };
#else
enum : u32 {
    SLOTS = 2, KEYS = 4, KEY_ROWS = 2, PART = 8, PARTS = OWN_D / 16, SUMS = OWN_D / 8,
    // Elements after each row of keys and of values in shared memory: successive rows of keys are offset by half of the
    // banks, successive rows of values by an eighth of the banks.
    KEY_PADDING = 64 / sizeof(KV),
    VALUE_PADDING = 16 / sizeof(KV)
};
DEV u32 query_of(u32 slot) { return (lane() >> 2) + slot * 8; }
DEV u32 key_of(u32 i) { return (i >> 1) * 8 + (lane() & 3) * 2 + (i & 1); }
DEV u32 key_row(u32 i) { return (lane() >> 2) + i * 8; }
DEV u32 part_slot(u32 p) { return (p & 3) >> 1; }
DEV u32 part_channel(u32 p) { return (p >> 2) * 64 + ((lane() & 3) * 2 + (p & 1)) * 8; }
#  define PART_VALUE(o, p, j) (o)[((p) >> 2) * 8 + (j)].v[(p) & 3]
#  define SLOT_OF_SUM(e) ((e) >> 1)
DEV float over_keys_max(float v) { return group_max<4>(v); }
DEV float over_keys_sum(float v) { return group_sum<4>(v); }
// Registers of a lane for the values of a tile as an MMA operand (warps of 32 lanes).
struct ValueOperand { half_x8 v[KEYS][OWN_D / 64]; };
#endif

// Registers of a lane for the MMA operands (queries, keys) and for the MMA result (scores).
struct QueryOperand { StripOperandA v[QUERY_PARTS]; };
struct KeyOperand { half_x8 v[KEY_ROWS][QUERY_PARTS]; };
struct ScoreFragment { float v[SLOTS][KEYS]; };
// Online softmax state (maximum, sum) and accumulated outputs of the queries of a lane.
struct SoftmaxState {
    float max[SLOTS], sum[SLOTS];  // sum of probabilities: of this lane's own keys until finish()
    f32x4 out[SUMS];
};

DEV void start(SoftmaxState& r) {
    UNROLL for (u32 i = 0; i < SLOTS; ++i) {
        r.max[i] = NO_SCORE;
        r.sum[i] = 0.f;
    }
    UNROLL for (u32 i = 0; i < SUMS; ++i) r.out[i] = f32x4{{0.f, 0.f, 0.f, 0.f}};
}

// Loads queries as an MMA operand. at(query) returns the address of a query, or null if the query does not
// exist.
template <class At> DEV QueryOperand load_queries(const At& at) {
    QueryOperand q;
    UNROLL for (u32 j = 0; j < STRIP_X; ++j) {
        const half_t* row = at(strip_x_row(j));
        UNROLL for (u32 i = 0; i < QUERY_PARTS; ++i)
            q.v[i].v[j] = row ? *(const half_x8*)(row + i * 32 + strip_k()) : zero8();
    }
    return q;
}

// Loads the 16 keys of a tile as an MMA operand. `keys`: address of the first key; keys are `stride` elements
// apart.
DEV KeyOperand load_keys(const KV* keys, u32 stride) {
    KeyOperand k;
    UNROLL for (u32 j = 0; j < KEY_ROWS; ++j)
        UNROLL for (u32 i = 0; i < QUERY_PARTS; ++i) k.v[j][i] = load_kv8(keys + key_row(j) * stride + i * 32 + strip_k());
    return k;
}

DEV ScoreFragment score(const QueryOperand& q, const KeyOperand& k) {
    ScoreFragment s;
#if WARP_SIZE == 64
    f32x4 c{{0.f, 0.f, 0.f, 0.f}};
    UNROLL for (u32 i = 0; i < QUERY_PARTS; ++i) strip_mma(c, StripOperandA{{k.v[0][i]}}, q.v[i].v[0]);
    UNROLL for (u32 i = 0; i < KEYS; ++i) s.v[0][i] = c.v[i];
#else
    f32x4 c[2] = {{{0.f, 0.f, 0.f, 0.f}}, {{0.f, 0.f, 0.f, 0.f}}};
    UNROLL for (u32 i = 0; i < QUERY_PARTS; ++i)
        UNROLL for (u32 j = 0; j < 2; ++j) strip_mma(c[j], q.v[i], k.v[j][i]);
    UNROLL for (u32 i = 0; i < SLOTS; ++i)
        UNROLL for (u32 j = 0; j < KEYS; ++j) s.v[i][j] = c[j >> 1].v[i * 2 + (j & 1)];
#endif
    return s;
}

// Loads the values of a tile. Values of keys from index `present` on, which are beyond the context, are
// replaced by zero, because freed KV blocks may contain NaN.
DEV ValueOperand load_values(const KV* values, u32 stride, u32 present) {
    ValueOperand v;
    UNROLL for (u32 i = 0; i < KEYS; ++i) {
        const u32 key = key_of(i);
#if WARP_SIZE == 64
        const KV* from = values + key * stride + (lane() & 15) * PART;
        struct ValueChannelRun { half_t v[PART]; };
#  if HEAD_DIM == 128
        const ValueChannelRun p = key < present ? bits_as<ValueChannelRun>(load_kv8(from)) : bits_as<ValueChannelRun>(zero8());
#  elif HEAD_DIM >= 256
        struct HalfX8Run { half_x8 v[PART / 8]; } run;
        UNROLL for (u32 h = 0; h < PART / 8; ++h) run.v[h] = zero8();
        if (key < present)
            UNROLL for (u32 h = 0; h < PART / 8; ++h) run.v[h] = load_kv8(from + h * 8);
        const ValueChannelRun p = bits_as<ValueChannelRun>(run);
#  else
        const ValueChannelRun p = bits_as<ValueChannelRun>(key < present ? load_kv4(from) : half_x4{});
#  endif
        UNROLL for (u32 j = 0; j < PART; ++j) v.v[i][j] = p.v[j];
#else
        UNROLL for (u32 h = 0; h < OWN_D / 64; ++h)
            v.v[i][h] = key < present ? load_kv8(values + key * stride + h * 64 + (lane() >> 2) * 8) : zero8();
#endif
    }
    return v;
}

// Replaces scores by probabilities. Query i of the lane attends to keys [0, seen[i]) of the tile. `factor`:
// softmax scale * log2(e).
DEV void online_softmax(SoftmaxState& r, ScoreFragment& s, const u32* seen, float factor) {
    float grown = 0.f, rescale[SLOTS];
    UNROLL for (u32 i = 0; i < SLOTS; ++i) {
        float max = r.max[i];
        UNROLL for (u32 j = 0; j < KEYS; ++j) {
            s.v[i][j] = key_of(j) < seen[i] ? s.v[i][j] * factor : NO_SCORE;
            max = fmax_(max, s.v[i][j]);
        }
        max = over_keys_max(max);
        rescale[i] = exp2_(r.max[i] - max);
        grown += max - r.max[i];
        r.max[i] = max;
        float sum = 0.f;
        UNROLL for (u32 j = 0; j < KEYS; ++j) {
            s.v[i][j] = key_of(j) < seen[i] ? exp2_(s.v[i][j] - max) : 0.f;
            sum += s.v[i][j];
        }
        r.sum[i] = fma_(r.sum[i], rescale[i], sum);
    }
    if (!warp_any(grown > 0.f)) return;  // No maximum has grown: every rescale factor is 1.
    UNROLL for (u32 i = 0; i < SUMS; ++i)
        UNROLL for (u32 e = 0; e < 4; ++e) r.out[i].v[e] *= rescale[SLOT_OF_SUM(e)];
}

// Adds the products of the probabilities and the values of a tile to the outputs r.out.
DEV void add_values(SoftmaxState& r, const ScoreFragment& p, const ValueOperand& v) {
#if WARP_SIZE == 64
    FragB b;
    UNROLL for (u32 i = 0; i < KEYS; ++i) b.x[i] = to_half(p.v[0][i]);
    UNROLL for (u32 j = 0; j < SUMS; ++j) {
        FragA a;
        UNROLL for (u32 i = 0; i < KEYS; ++i) a.x[i] = v.v[i][j];
        FragC c = bits_as<FragC>(r.out[j]);
        mma16(c, a, b);
        r.out[j] = bits_as<f32x4>(c);
    }
#else
    u32 a[4];
    UNROLL for (u32 i = 0; i < 4; ++i) a[i] = pack_half(p.v[i & 1][i >> 1 << 1], p.v[i & 1][(i >> 1 << 1) + 1]);
    UNROLL for (u32 h = 0; h < OWN_D / 64; ++h)
        UNROLL for (u32 j = 0; j < 8; ++j) {
            const u32 b0 = (u32)v.v[0][h].v[j].bits | (u32)v.v[1][h].v[j].bits << 16;
            const u32 b1 = (u32)v.v[2][h].v[j].bits | (u32)v.v[3][h].v[j].bits << 16;
            mma_half(r.out[h * 8 + j], a[0], a[1], a[2], a[3], b0, b1);
        }
#endif
}

// Replaces the sum of probabilities of each query by its total over the lanes that have keys of that query;
// called after the last tile.
DEV void finish(SoftmaxState& r) {
    UNROLL for (u32 i = 0; i < SLOTS; ++i) r.sum[i] = over_keys_sum(r.sum[i]);
}
