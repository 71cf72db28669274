// dev/half.h - half_t, the 16-bit type of weights, activations and the KV pool. All kernels of a device use
// the same type: bf16, or IEEE binary16 (f16) with -DHALF_F16=1. Sums, norms, scores and softmax are f32 with
// either type; f16 overflows to infinity above 65504.
//
//   half_t, half_x2|4|8   one value; vectors of 2, 4 or 8 values
//   f32(x)  to_half(x)    conversion to and from f32; every conversion to half_t rounds to nearest even
//   pack_half(low, high)  packs two f32 as a pair in one word;  low_half(pair) high_half(pair) return f32
//   HALF_PTX              name of the type in PTX instructions
//   pack_f16(low, high)   packs a pair of f16, whatever half_t is
#pragma once

struct half_t { u16 bits; };
struct alignas(4) half_x2 { half_t v[2]; };
struct alignas(8) half_x4 { half_t v[4]; };
struct alignas(16) half_x8 { half_t v[8]; };

#if HALF_F16
#  define HALF_PTX "f16"
DEV float f32(half_t x) { return f16_value(x.bits); }
DEV u16 half_bits(float x) { return f16_bits(x); }
DEV float low_half(u32 pair) { return f16_value((u16)pair); }
DEV float high_half(u32 pair) { return f16_value((u16)(pair >> 16)); }
#else
#  define HALF_PTX "bf16"
DEV float f32(half_t x) { return as_f32((u32)x.bits << 16); }
DEV u16 half_bits(float x) { return bf16_bits(x); }
DEV float low_half(u32 pair) { return as_f32(pair << 16); }
DEV float high_half(u32 pair) { return as_f32(pair & 0xffff0000u); }
#endif
DEV half_t to_half(float x) { return half_t{half_bits(x)}; }

#if DEV_NV
DEV u32 pack_half(float low, float high) {
    u32 r;
    asm("cvt.rn." HALF_PTX "x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
DEV u32 pack_f16(float low, float high) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
#else
DEV u32 pack_half(float low, float high) { return (u32)half_bits(low) | (u32)half_bits(high) << 16; }
DEV u32 pack_f16(float low, float high) { return (u32)f16_bits(low) | (u32)f16_bits(high) << 16; }
#endif
