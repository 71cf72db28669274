// moe_grouped_gemm_tma/store.h - stores the results of a pass (strips of one expert times the rows of one
// segment, share.h).
#pragma once
#include "moe/bias.h"
#include "moe_grouped_gemm_tma/roles.h"
#include "moe_grouped_gemm_tma/share.h"

// Exchanges values between the lanes of two adjacent outputs, so that each lane then has both outputs of one
// row. Before the exchange, `a` and `b` are the values of this lane for rows 2 (lane % 4) and 2 (lane % 4) +
// 1 of a group of 8 rows. The lane of the even output gets both outputs of the first of these rows, the lane
// of the odd output those of the second.
template <class T> DEV void exchange_halves(T& a, T& b, bool odd) {
    const T given = shfl_xor(odd ? a : b, 4);
    (odd ? a : b) = given;
}

// Stores gated(gate, up) to y; row p of y belongs to position p of `order` (moe/segment.h). A lane has gate
// and up of one output, for two rows of each group of eight.
DEV void store_gated(half_t* y, const float (&c)[ROWS / 2], const BlockWorkCursor& share, const ExpertBiases& biases,
                     u32 strip, u32 y_stride) {
    const bool odd = lane() / 4 % 2, present = strip < share.strips;
    const u32 out = (share.first + strip) * 8 + lane() / 8 * 2, own = out + odd;
    const float gate_bias = present ? bias_of(biases, share.expert, own) : 0.f;
    const float up_bias = present ? bias_of(biases, share.expert, biases.n / 2 + own) : 0.f;
    UNROLL for (u32 j = 0; j < ROWS / 8; ++j) {
        if (j * 8 >= share.rows) break;
        float a = gated(add_bias(c[4 * j], gate_bias), add_bias(c[4 * j + 2], up_bias));
        float b = gated(add_bias(c[4 * j + 1], gate_bias), add_bias(c[4 * j + 3], up_bias));
        exchange_halves(a, b, odd);
        const u32 row = j * 8 + lane() % 4 * 2 + odd;
        if (!present || row >= share.rows) continue;
        *(u32*)(y + (u64)(share.position + row) * y_stride + out) = pack_half(a, b);
    }
}

// Four adjacent outputs of one row: half_t with WIDE_TILE, else f32.
#if WIDE_TILE
struct alignas(8) OutputQuad { u32 v[2]; };
DEV u32 pack_pair(float a, float b) { return pack_half(a, b); }
#else
struct alignas(16) OutputQuad { f32x2 v[2]; };
DEV f32x2 pack_pair(float a, float b) { return f32x2{{a, b}}; }
DEV f32x2 shfl_xor(f32x2 v, u32 mask) { return f32x2{{::shfl_xor(v.v[0], mask), ::shfl_xor(v.v[1], mask)}}; }
#endif
// Stores the results of the down projection; row c of y belongs to choice c (moe/segment.h). A lane has two
// adjacent outputs, for two rows of each group of eight.
template <class Out> DEV void store_choices(Out* y, const float (&c)[ROWS / 2], const BlockWorkCursor& share,
                                            const ExpertBiases& biases, const u32* order, u32 strip, u32 y_stride) {
    const bool odd = lane() / 4 % 2, present = strip < share.strips;
    const u32 out = (share.first + strip) * 16 + lane() / 8 * 4, own = out + odd * 2;
    const float low_bias = present ? bias_of(biases, share.expert, own) : 0.f;
    const float high_bias = present ? bias_of(biases, share.expert, own + 1) : 0.f;
    u32 choices[ROWS / WARP_SIZE];
    UNROLL for (u32 i = 0; i < ROWS / WARP_SIZE; ++i)
        choices[i] = i * WARP_SIZE + lane() < share.rows ? order[share.position + i * WARP_SIZE + lane()] : 0;
    UNROLL for (u32 j = 0; j < ROWS / 8; ++j) {
        if (j * 8 >= share.rows) break;
        OutputQuad p{{pack_pair(add_bias(c[4 * j], low_bias), add_bias(c[4 * j + 2], high_bias)),
                      pack_pair(add_bias(c[4 * j + 1], low_bias), add_bias(c[4 * j + 3], high_bias))}};
        exchange_halves(p.v[0], p.v[1], odd);
        const u32 row = j * 8 + lane() % 4 * 2 + odd;
        const u64 choice = shfl(choices[j * 8 / WARP_SIZE], row % WARP_SIZE);
        if (present && row < share.rows) *(OutputQuad*)(y + choice * y_stride + out) = p;
    }
}
