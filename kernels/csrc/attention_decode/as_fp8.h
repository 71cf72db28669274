// attention_decode/as_fp8.h - MMA operands of keys_first.h for an fp8 KV pool. Keys and values are converted
// exactly to f16, two per instruction. Queries are converted to f16, multiplied by a power of two per query
// if they would otherwise exceed the range of f16. Probabilities are converted without a scale, because they
// are at most 2^SLACK.
#pragma once
#include "dev/fp8_f16.h"

typedef fp8 KV;
struct QueryOperand {
    QueryVectors<u32x4> words;
    float down[SLOTS];  // factors that undo the query scale in the scores of this lane's queries
};
struct KeyOperand { fp8x8 v[KEY_ROWS][D / 32]; };

DEV fp8x8 load_kv8(const KV* p) { return *(const fp8x8*)p; }

// Loads queries as an MMA operand. at(query) returns the address of a query, or null if the query does not
// exist. Every lane of the warp must call it.
template <class At> DEV QueryOperand load_queries(const At& at) {
    const half_t* row = at(strip_w_row());
    half_x8 values[D / 32];
    float peak = 0.f;
    UNROLL for (u32 i = 0; i < D / 32; ++i) {
        values[i] = row ? *(const half_x8*)(row + i * 32 + strip_k()) : zero8();
        peak = peak_of(values[i], peak);
    }
    const RowScaleFactors factor = row_factor(group_max<4>(peak));
    QueryOperand q;
    UNROLL for (u32 i = 0; i < D / 32; ++i) set_query_vector(q.words, i, scaled_f16(values[i], factor.up));
    UNROLL for (u32 i = 0; i < SLOTS; ++i) q.down[i] = shfl(factor.down, query_of(i) * 4);
    return q;
}

// Eight fp8 values as 32-bit words.
struct Fp8Words { u32 v[2]; };

// Adds to the scores c the products of keys and queries over channels [32 i, 32 i + 32).
DEV void score_channels(f32x4& c, const QueryOperand& q, const KeyOperand& k, u32 i) {
    const Fp8Words low = bits_as<Fp8Words>(k.v[0][i]), high = bits_as<Fp8Words>(k.v[1][i]);
    const u32x4 query = query_vector(q.words, i);
    UNROLL for (u32 h = 0; h < 2; ++h)
        mma_f16(c, widen_fp8(low.v[h]), widen_fp8(high.v[h]), widen_fp8(low.v[h] >> 16), widen_fp8(high.v[h] >> 16),
                query.v[h * 2], query.v[h * 2 + 1]);
}
DEV float score_factor(const QueryOperand& q, u32 slot) { return q.down[slot]; }

// pack_weights packs two probabilities into a 32-bit word. mma_values adds the product of 16 channels of the
// values with probabilities to c; channel_of maps a row of this MMA result to its channel.
DEV u32 pack_weights(float low, float high) { return pack_f16(low, high); }
DEV void mma_values(f32x4& c, const u32x4& v, u32 b0, u32 b1) { mma_f16(c, v.v[0], v.v[1], v.v[2], v.v[3], b0, b1); }
DEV u32 channel_of(u32 half) { return (lane() >> 2) * 2 + half; }

// The lane's `word` contains channels 2 c and 2 c + 1 of two keys. Returns two words: `even` with channel 2 c
// and `odd` with channel 2 c + 1 of both keys.
DEV void transpose_pairs(u32 word, u32& even, u32& odd) {
#if DEV_NV
    const u32 swapped = __byte_perm(word, 0, 0x3120);
#else
    const u32 swapped = (word & 0xff0000ffu) | (word >> 8 & 0xff00u) | (word << 8 & 0xff0000u);
#endif
    even = widen_fp8(swapped);
    odd = widen_fp8(swapped >> 16);
}
