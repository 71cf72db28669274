// dev/half.h - IEEE binary16 as fp8 meets it on NVIDIA's matrix units: an fp8 number is exact in it, and one instruction
// turns two. So is a half_t number times a power of two that keeps it in range. Waves of 32 lanes.
//
//   widen_fp8(pair)       two fp8 in the lower half as a pair of f16
//   pack_f16(low, high)   two f32 as a pair of f16, to nearest even
//   mma_f16(c, a.., b..)  one m16n8k16: c (16x8) += a (16x16) * b (16x8); registers as in mma_half of dev/strip.h
#pragma once
#include "dev/strip.h"

struct f16 { u16 bits; };

#if DEV_NV && DEV_SM >= 890
DEV u32 widen_fp8(u32 pair) {
    u32 r;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"((u16)pair));
    return r;
}
DEV u32 pack_f16(float low, float high) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
DEV void mma_f16(f32x4& c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(c.v[0]), "+f"(c.v[1]), "+f"(c.v[2]), "+f"(c.v[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
#elif DEV_EMU && WAVE == 32
// Exponent and mantissa moved in place, then a product that changes the bias, exactly.
DEV float f32(f16 x) {
    const u32 sign = (u32)(x.bits & 0x8000) << 16, size = x.bits & 0x7fff;
    if (size >= 0x7c00) return as_f32(sign | 0x7f800000u | (size & 0x3ff) << 13);
    return as_f32(sign | as_u32(as_f32(size << 13) * as_f32((127u + 112u) << 23)));
}
DEV u16 f16_bits(float x) {
    const u32 sign = as_u32(x) >> 16 & 0x8000, a = as_u32(x) & 0x7fffffffu;
    if (a > 0x7f800000u) return (u16)(sign | 0x7e00);
    if (a >= 0x477ff000u) return (u16)(sign | 0x7c00);
    // Below the normal range values are multiples of 2^-24: adding 1.5 * 2^23 rounds to one of them.
    if (a < 0x38800000u) return (u16)(sign | (as_u32(as_f32(a) * 16777216.0f + 12582912.0f) & 0xffffu));
    return (u16)(sign | ((a + 0xfffu + (a >> 13 & 1)) >> 13) - (112u << 10));
}
DEV u32 pack_f16(float low, float high) { return (u32)f16_bits(low) | (u32)f16_bits(high) << 16; }
DEV u32 widen_fp8(u32 pair) {
    const f32x2 x = unpack_fp8(pair & 0xffffu);
    return pack_f16(x.v[0], x.v[1]);
}
DEV void mma_f16(f32x4& c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1 DEV_SITE) {
    const u32 a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
    f16 as[8], bs[4];
    for (u32 i = 0; i < 8; ++i) as[i].bits = (u16)(a[i / 2] >> (i % 2 * 16));
    for (u32 i = 0; i < 4; ++i) bs[i].bits = (u16)(b[i / 2] >> (i % 2 * 16));
    emu::tile_product<HalfLayout, 16, 8, 16>(c.v, as, bs DEV_AT);
}
#endif

// The power of two that brings a row whose largest value is `peak` just below the end of f16's range, and its inverse.
// Values 2^29 times smaller than the largest are still exact. Rows whose largest value lies between 2^-6 and 2^15 stay as
// they are: what f16 leaves of their smallest values is off by 2^-25.
struct RowFactor { float up, down; };
DEV bool needs_factor(float peak) { return !(peak < 32768.f && (peak >= 0.015625f || peak == 0.f)); }
DEV RowFactor row_factor(float peak) {
    if (!needs_factor(peak)) return RowFactor{1.f, 1.f};
    u32 exponent = as_u32(peak) >> 23;
    if (exponent < 15) exponent = 15;
    return RowFactor{as_f32((268 - exponent) << 23), as_f32((exponent - 14) << 23)};
}

// Eight half_t times `up` as f16.
DEV u32x4 scaled_f16(const half_x8& x, float up) {
    const u32x4 w = bits_as<u32x4>(x);
    u32x4 r;
#if (DEV_NV && DEV_SM >= 890) || (DEV_EMU && WAVE == 32)
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
