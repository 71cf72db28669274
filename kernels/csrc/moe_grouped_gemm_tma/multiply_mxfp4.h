// moe_grouped_gemm_tma/multiply_mxfp4.h - products of a pipeline stage with MXFP4 weights, which are decoded to half_t
// in registers, exactly in bf16.
#pragma once
#include "moe/tma_mxfp4.h"

// MXFP4 weights that a lane has of a strip (16 rows of W) over 128 columns (K): its words and the scales of lines
// lane / 4 and lane / 4 + 8.
struct PackedStrip { u32x4 words[2]; u32 scales[2]; };
DEV PackedStrip packed_strip(const u8* strip) {
    PackedStrip packed;
    UNROLL for (u32 half = 0; half < 2; ++half) {
        const u32 line = lane() / 4 + half * 8;
        packed.words[half] = *(const u32x4*)(strip + line * LINE_ELEMENT_BYTES + lane() % 4 * 16);
        packed.scales[half] = *(const u32*)(strip + STRIP_SCALES + line * 4);
    }
    return packed;
}

// Weights of 64 columns as the register operands A of four WGMMAs of 16 columns each.
struct DecodedStrip { u32 a[4][4]; };
// Decodes the lower (upper = 0) or the upper 64 columns of a strip.
DEV DecodedStrip decode_strip(const PackedStrip& packed, u32 upper) {
    DecodedStrip w;
    UNROLL for (u32 half = 0; half < 2; ++half)
        UNROLL for (u32 i = 0; i < 2; ++i) {
            const u32 group = upper * 2 + i;
            const DecodedPairs pairs = decode_mxfp4_pairs(packed.words[half].v[group], packed.scales[half], group);
            UNROLL for (u32 p = 0; p < PAIRS; ++p) w.a[i * 2 + p / 2][p % 2 * 2 + half] = pairs.v[p];
        }
    return w;
}

// Accumulators of the first N rows of x.
template <u32 N> DEV float (&first_rows(float (&c)[ROWS / 2]))[N / 2] { return reinterpret_cast<float (&)[N / 2]>(c); }

// Adds the products of one pipeline stage with the first N rows of x. While weights are decoded, the WGMMAs of the
// previous ones run.
template <u32 N> DEV void multiply_rows(PassAccumulators& sums, const u8* stage) {
    const KMajorOperand x = warp_uniform(by_k(stage + WEIGHT_BYTES));
    UNROLL for (u32 t = 0; t < GROUP_LINES / 64; ++t) {
        const PackedStrip packed = packed_strip(stage + strip_of_sums(t) * STRIP_BYTES);
        UNROLL for (u32 upper = 0; upper < 2; ++upper) {
            const DecodedStrip w = decode_strip(packed, upper);
            const KMajorOperand panel = advanced(x, upper * PANEL_BYTES);
            wgmma_fence();
            UNROLL for (u32 i = 0; i < 4; ++i) wgmma<N>(first_rows<N>(sums.c[t]), w.a[i], advanced(panel, i * 32), true);
            wgmma_commit();
            wgmma_wait<1>();
        }
    }
    wgmma_wait<0>();
    UNROLL for (u32 t = 0; t < GROUP_LINES / 64; ++t) wgmma_fence_operand(sums.c[t]);
}

// Adds the products of one pipeline stage. WGMMAs take time that decoding does not hide, so few rows use narrow ones; the
// sum of a row does not depend on the width. `rows`: rows of x in the pass.
DEV void multiply_stage(PassAccumulators& sums, const u8* stage, u32 rows) {
    if (ROWS <= 32 && rows <= 8) return multiply_rows<8>(sums, stage);
    if (ROWS == 32 && rows <= 16) return multiply_rows<16>(sums, stage);
    multiply_rows<ROWS>(sums, stage);
}
