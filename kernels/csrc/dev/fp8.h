// dev/fp8.h - fp8 e4m3 in the format of the target. OCP (largest value 448, bias 7): NVIDIA, gfx950, gfx90a
// in software, the CPU. FNUZ (largest value 240, bias 8, no negative zero, NaN is 0x80): gfx942. The emulator
// uses OCP unless -DFP8_FNUZ=1 or -DDEV_EMU_GFX=0x942.
// Conversion to fp8 rounds to nearest even and saturates; NaN stays NaN.
#pragma once

#if !defined(FP8_FNUZ)
#  define FP8_FNUZ (DEV_GFX == 0x942)
#endif
#define FP8_MAX (FP8_FNUZ ? 240.0f : 448.0f)

struct fp8 { u8 bits; };
struct alignas(4) fp8x4 { fp8 v[4]; };
struct alignas(8) fp8x8 { fp8 v[8]; };
struct alignas(16) fp8x16 { fp8 v[16]; };

DEV u8 fp8_bits_soft(float f) {
    const int bias = FP8_FNUZ ? 8 : 7;
    const u32 sign = as_u32(f) >> 31;
    u32 a = as_u32(f) & 0x7fffffffu;
    if (a > 0x7f800000u) return FP8_FNUZ ? 0x80 : (u8)(0x7f | sign << 7);
    if (a > as_u32(FP8_MAX)) a = as_u32(FP8_MAX);
    int q;
    if ((int)(a >> 23) - 127 < 1 - bias) {
        // fp8 subnormals are multiples of 2^(1 - bias - 3). After a multiplication that maps this unit to 1,
        // adding 1.5 * 2^23 rounds to an integer, the mantissa bits of the subnormal.
        const float t = as_f32(a) * as_f32((u32)(127 + bias + 2) << 23) + 12582912.0f;
        q = (int)(as_u32(t) & 0xffu);
    } else {
        a += 0x7ffffu + ((a >> 20) & 1u);
        q = (int)((a >> 20) - ((u32)(127 - bias) << 3));
    }
    if (FP8_FNUZ && q == 0) return 0;
    return (u8)(q | (int)(sign << 7));
}
DEV float f32_soft(fp8 x) {
    const float bias = as_f32((u32)(127 + (FP8_FNUZ ? 119 : 120)) << 23);
    const u32 nan = FP8_FNUZ ? x.bits == 0x80 : (x.bits & 0x7f) == 0x7f;
    if (nan) return as_f32(0x7fc00000u);
    // Shifts exponent and mantissa into place, then corrects the exponent bias by a multiplication, which is
    // exact.
    return as_f32((u32)(x.bits & 0x80) << 24 | (u32)(x.bits & 0x7f) << 20) * bias;
}

// Converts x0 and x1 to fp8, and packs them into a 16-bit word with x0 in the lower byte.
DEV u16 pack_fp8(float x0, float x1) {
#if DEV_AMD && (DEV_GFX == 0x942 || DEV_GFX == 0x950)
    // The conversion instruction does not saturate, so values are clamped by v_med3 first. v_med3 would turn
    // NaN into a number; therefore NaN is not clamped.
    const float a = x0 != x0 ? x0 : __builtin_amdgcn_fmed3f(x0, FP8_MAX, -FP8_MAX);
    const float b = x1 != x1 ? x1 : __builtin_amdgcn_fmed3f(x1, FP8_MAX, -FP8_MAX);
    return (u16)__builtin_amdgcn_cvt_pk_fp8_f32(a, b, 0, false);
#elif DEV_SM >= 890
    u16 r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(x1), "f"(x0));
    return r;
#else
    return (u16)(fp8_bits_soft(x0) | fp8_bits_soft(x1) << 8);
#endif
}
// Converts the two fp8 values in the lower two bytes of `pair` to f32.
DEV f32x2 unpack_fp8(u32 pair) {
#if DEV_AMD && (DEV_GFX == 0x942 || DEV_GFX == 0x950)
    typedef float Pair __attribute__((ext_vector_type(2)));
    const Pair r = __builtin_amdgcn_cvt_pk_f32_fp8((int)pair, false);
    return f32x2{{r[0], r[1]}};
#elif DEV_SM >= 890
    u32 halves;
    f32x2 r;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((u16)pair));
    asm("{.reg .b16 a, b;\n mov.b32 {a, b}, %2;\n cvt.f32.f16 %0, a;\n cvt.f32.f16 %1, b;}"
        : "=f"(r.v[0]), "=f"(r.v[1]) : "r"(halves));
    return r;
#else
    return f32x2{{f32_soft(fp8{(u8)pair}), f32_soft(fp8{(u8)(pair >> 8)})}};
#endif
}
// Converts the two fp8 values in the upper or the lower two bytes of `word` to f32.
template <bool UPPER> DEV f32x2 unpack_fp8_of(u32 word) {
#if DEV_AMD && (DEV_GFX == 0x942 || DEV_GFX == 0x950)
    typedef float Pair __attribute__((ext_vector_type(2)));
    const Pair r = __builtin_amdgcn_cvt_pk_f32_fp8((int)word, UPPER);
    return f32x2{{r[0], r[1]}};
#else
    return unpack_fp8(word >> (UPPER ? 16 : 0) & 0xffffu);
#endif
}
// Packs two f32 as a pair of half_t, which must represent both values exactly.
DEV u32 pack_exact(const f32x2& x) {
#if DEV_AMD && !HALF_F16
    return __builtin_amdgcn_perm(as_u32(x.v[1]), as_u32(x.v[0]), 0x07060302u);  // the upper halves of both words
#else
    return pack_half(x.v[0], x.v[1]);
#endif
}
// Converts the two fp8 values in the lower two bytes of `pair` to a pair of f16. The conversion is exact.
DEV u32 widen_fp8(u32 pair) {
#if DEV_SM >= 890
    u32 r;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"((u16)pair));
    return r;
#else
    const f32x2 x = unpack_fp8(pair & 0xffffu);
    return pack_f16(x.v[0], x.v[1]);
#endif
}
// A word has four fp8 values. widen_uppers converts the upper byte of each 16-bit half of the word to half_t,
// and widen_lowers the lower byte; both return a pair of half_t, and the conversion is exact. If half_t is
// bf16, an fp8 NaN becomes 480 instead of NaN.
#if HALF_F16 && DEV_SM >= 890
DEV u32 widen_uppers(u32 word) { return widen_fp8(__byte_perm(word, 0, 0x31)); }
DEV u32 widen_lowers(u32 word) { return widen_fp8(__byte_perm(word, 0, 0x20)); }
#elif DEV_SM >= 900
// Shifts exponent and mantissa into place, then corrects the exponent bias by a multiplication, which is
// exact.
DEV u32 widen_uppers(u32 word) {
    const u32 moved = (word >> 4 & 0x07f007f0u) | (word & 0x80008000u), two_to_120 = 0x7b807b80u;
    u32 r;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(moved), "r"(two_to_120));
    return r;
}
DEV u32 widen_lowers(u32 word) { return widen_uppers(word << 8); }
#else
DEV u32 widen_uppers(u32 word) {
    return pack_exact(f32x2{{unpack_fp8(word >> 8 & 0xffu).v[0], unpack_fp8(word >> 24).v[0]}});
}
DEV u32 widen_lowers(u32 word) { return widen_uppers(word << 8); }
#endif
DEV float f32(fp8 x) { return unpack_fp8(x.bits).v[0]; }
DEV fp8 to_fp8(float x) { return fp8{(u8)pack_fp8(x, 0.f)}; }
template <> struct RoundTo<fp8> { DEV fp8 of(float x) { return to_fp8(x); } };

DEV f32x8 widen(const fp8x8& x) {
    struct WordPair { u32 v[2]; };
    const WordPair w = bits_as<WordPair>(x);
    f32x8 r;
    for (u32 i = 0; i < 4; ++i) {
        const f32x2 pair = unpack_fp8((w.v[i / 2] >> (i % 2 * 16)) & 0xffffu);
        r.v[2 * i] = pair.v[0];
        r.v[2 * i + 1] = pair.v[1];
    }
    return r;
}
// Converts eight values to half_t, exactly.
DEV half_x8 widen_half(const fp8x8& x) {
#if HALF_F16 && DEV_SM >= 890
    struct WordPair { u32 v[2]; };
    const WordPair w = bits_as<WordPair>(x);
    return bits_as<half_x8>(u32x4{{widen_fp8(w.v[0]), widen_fp8(w.v[0] >> 16), widen_fp8(w.v[1]), widen_fp8(w.v[1] >> 16)}});
#elif DEV_NV
    return narrow(widen(x));
#else
    struct WordPair { u32 v[2]; };
    const WordPair w = bits_as<WordPair>(x);
    u32x4 r;
    UNROLL for (u32 i = 0; i < 2; ++i) {
        r.v[2 * i] = pack_exact(unpack_fp8_of<false>(w.v[i]));
        r.v[2 * i + 1] = pack_exact(unpack_fp8_of<true>(w.v[i]));
    }
    return bits_as<half_x8>(r);
#endif
}
DEV fp8x8 narrow_fp8(const f32x8& x) {
    struct WordPair { u32 v[2]; } w;
    for (u32 i = 0; i < 2; ++i) {
        const float* p = x.v + 4 * i;
        w.v[i] = (u32)pack_fp8(p[0], p[1]) | (u32)pack_fp8(p[2], p[3]) << 16;
    }
    return bits_as<fp8x8>(w);
}
DEV f32x8 load8(const fp8* p) { return widen(*(const fp8x8*)p); }
DEV f32x8 load8_stream(const fp8* p) { return widen(load_stream((const fp8x8*)p)); }
DEV void store8(fp8* p, const f32x8& x) { *(fp8x8*)p = narrow_fp8(x); }
