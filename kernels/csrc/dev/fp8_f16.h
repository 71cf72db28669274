// dev/fp8_f16.h - fp8 weights as operands of f16 MMAs on NVIDIA: f16 represents every fp8 value exactly, and
// one instruction converts two values. A bf16 value, multiplied by a power of two that brings it into the
// range of f16, is exact in f16 as well. Warps of 32 lanes.
//
//   mma_f16(c, a.., b..)  one m16n8k16 MMA: c (16x8) += a (16x16) * b (16x8); registers as in mma_half of
//                         dev/strip.h
#pragma once
#include "dev/strip.h"

struct f16 { u16 bits; };

#if DEV_NV && DEV_SM >= 890
DEV void mma_f16(f32x4& c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(c.v[0]), "+f"(c.v[1]), "+f"(c.v[2]), "+f"(c.v[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
#elif DEV_EMU && WARP_SIZE == 32
DEV float f32(f16 x) { return f16_value(x.bits); }
DEV void mma_f16(f32x4& c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1 DEV_SITE) {
    const u32 a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
    f16 as[8], bs[4];
    for (u32 i = 0; i < 8; ++i) as[i].bits = (u16)(a[i / 2] >> (i % 2 * 16));
    for (u32 i = 0; i < 4; ++i) bs[i].bits = (u16)(b[i / 2] >> (i % 2 * 16));
    emu::tile_product<MmaM16n8k16Layout, 16, 8, 16>(c.v, as, bs DEV_AT);
}
#endif

// Scale factors of a row of x: `up` is the power of two by which a row with largest magnitude `peak` is
// multiplied so that it just fits the range of f16; `down` is its inverse. After scaling, bf16 values down to
// 2^-29 times the largest value are exact in f16. Rows with a largest magnitude between 2^-6 and 2^15 are not
// scaled: the rounding error of their smallest values in f16 is at most 2^-25. If half_t is f16, rows are
// never scaled.
struct RowScaleFactors { float up, down; };
DEV bool needs_factor(float peak) {
#if HALF_F16
    return false;
#else
    return !(peak < 32768.f && (peak >= 0.015625f || peak == 0.f));
#endif
}
DEV RowScaleFactors row_factor(float peak) {
    if (!needs_factor(peak)) return RowScaleFactors{1.f, 1.f};
    u32 exponent = as_u32(peak) >> 23;
    if (exponent < 15) exponent = 15;
    return RowScaleFactors{as_f32((268 - exponent) << 23), as_f32((exponent - 14) << 23)};
}

// Converts eight half_t, multiplied by `up`, to f16; `up` is 1 if half_t is f16.
DEV u32x4 scaled_f16(const half_x8& x, float up) {
    const u32x4 w = bits_as<u32x4>(x);
    u32x4 r;
#if !HALF_F16 && ((DEV_NV && DEV_SM >= 890) || (DEV_EMU && WARP_SIZE == 32))
    UNROLL for (u32 i = 0; i < 4; ++i) r.v[i] = pack_f16(low_half(w.v[i]) * up, high_half(w.v[i]) * up);
#else
    UNROLL for (u32 i = 0; i < 4; ++i) r.v[i] = w.v[i];
#endif
    return r;
}
DEV float peak_of(const half_x8& x, float peak) {
    UNROLL for (u32 i = 0; i < 8; ++i) peak = fmax_(peak, fabs_(f32(x.v[i])));
    return peak;
}
