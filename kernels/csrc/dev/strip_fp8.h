// dev/strip_fp8.h - MMA of rows of x with a strip of W (STRIP_ROWS rows, dev/strip.h) in fp8, over 32
// elements of K at a time. Operands are 8-byte vectors of 8 elements that are consecutive along K; rows and K
// indices are mapped to lanes as in dev/strip.h. gfx942, gfx950 and NVIDIA (sm_89 on) multiply in fp8; other
// targets convert to half_t, which represents every fp8 value exactly.
#pragma once
#include "dev/strip.h"

// Operand A of strip_fp8_mma() in the registers of a lane: vectors of 8 fp8 elements along K of rows of x.
struct StripFp8OperandA { fp8x8 v[STRIP_X]; };

DEV void strip_fp8_mma(f32x4& c, const StripFp8OperandA& x, const fp8x8& w) {
#if (DEV_GFX == 0x942 || DEV_GFX == 0x950) && WARP_SIZE == 64
    mfma_16x16x32(c, x.v[0], w);
#elif DEV_NV && DEV_SM >= 890
    struct WordPair { u32 v[2]; };
    const WordPair a = bits_as<WordPair>(x.v[0]), b = bits_as<WordPair>(x.v[1]), v = bits_as<WordPair>(w);
    asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(c.v[0]), "+f"(c.v[1]), "+f"(c.v[2]), "+f"(c.v[3])
        : "r"(a.v[0]), "r"(b.v[0]), "r"(a.v[1]), "r"(b.v[1]), "r"(v.v[0]), "r"(v.v[1]));
#else
    StripOperandA wide;
    UNROLL for (u32 j = 0; j < STRIP_X; ++j) wide.v[j] = widen_half(x.v[j]);
    strip_mma(c, wide, widen_half(w));
#endif
}
