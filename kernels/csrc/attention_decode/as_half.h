// attention_decode/as_half.h - MMA operands of keys_first.h for a half_t KV pool: keys and values are MMA
// operands in the layout that they have in memory, without conversion or shuffles.
#pragma once

typedef half_t KV;
typedef QueryVectors<half_x8> QueryOperand;
struct KeyOperand { half_x8 v[KEY_ROWS][D / 32]; };

DEV half_x8 load_kv8(const KV* p) { return *(const half_x8*)p; }

// Loads queries as an MMA operand. at(query) returns the address of a query, or null if the query does not
// exist.
template <class At> DEV QueryOperand load_queries(const At& at) {
    QueryOperand q;
    const half_t* row = at(strip_w_row());
    UNROLL for (u32 i = 0; i < D / 32; ++i)
        set_query_vector(q, i, row ? *(const half_x8*)(row + i * 32 + strip_k()) : zero8());
    return q;
}

// Adds to the scores c the products of keys and queries over channels [32 i, 32 i + 32).
DEV void score_channels(f32x4& c, const QueryOperand& q, const KeyOperand& k, u32 i) {
    strip_mma(c, StripOperandA{{k.v[0][i], k.v[1][i]}}, query_vector(q, i));
}
DEV float score_factor(const QueryOperand&, u32) { return 1.f; }

// pack_weights packs two probabilities into a 32-bit word. mma_values adds the product of 16 channels of the
// values with probabilities to c; channel_of maps a row of this MMA result to its channel.
DEV u32 pack_weights(float low, float high) { return pack_half(low, high); }
DEV void mma_values(f32x4& c, const u32x4& v, u32 b0, u32 b1) { mma_half(c, v.v[0], v.v[1], v.v[2], v.v[3], b0, b1); }
DEV u32 channel_of(u32 half) { return (lane() >> 2) + half * 8; }
