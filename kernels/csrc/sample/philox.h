// philox.h - counter-based noise: Philox4x32-10 (Salmon et al., 2011) and Gumbel noise derived from it. CPU
// reference: cpu/sample/philox.rs, which gives identical words; its noise agrees to a few units in the last
// place.
//
// The key is SequenceSamplingParams.key, the counter (id / 4, draw, position, 0), where `draw` is a DRAW_
// constant. Word id % 4 of the result belongs to the id.
#pragma once

enum : u32 { DRAW_TOKEN = 0, DRAW_ACCEPT = 1 };

// Returns the random words of ids 4 * group to 4 * group + 3.
DEV u32x4 philox(u64 key, u32 group, u32 draw, u32 position) {
    u32 a = group, b = draw, c = position, d = 0, k0 = (u32)key, k1 = (u32)(key >> 32);
    for (u32 round = 0; round < 10; ++round) {
        const u64 left = (u64)a * 0xd2511f53u, right = (u64)c * 0xcd9e8d57u;
        a = (u32)(right >> 32) ^ b ^ k0;
        c = (u32)(left >> 32) ^ d ^ k1;
        b = (u32)right;
        d = (u32)left;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    return u32x4{{a, b, c, d}};
}

// Returns a * b, rounded: the product is never contracted into a fused multiply-add.
DEV float mul_rounded(float a, float b) {
#if DEV_NV
    return __fmul_rn(a, b);
#else
    float product = a * b;
#  if DEV_AMD
    asm("" : "+v"(product));
#  endif
    return product;
#endif
}

// Returns ln(x) for normal x > 0, to about one unit in the last place (the Cephes polynomial).
DEV float ln(float x) {
    const u32 bits = as_u32(x);
    float e = (float)((i32)(bits >> 23) - 126), m = as_f32((bits & 0x7fffffu) | 0x3f000000u);  // m in [1/2, 1)
    if (m < 0.70710678f) {
        e -= 1.f;
        m += m;
    }
    m -= 1.f;
    float p = 7.0376836292e-2f;
    p = p * m - 1.1514610310e-1f;
    p = p * m + 1.1676998740e-1f;
    p = p * m - 1.2420140846e-1f;
    p = p * m + 1.4249322787e-1f;
    p = p * m - 1.6668057665e-1f;
    p = p * m + 2.0000714765e-1f;
    p = p * m - 2.4999993993e-1f;
    p = p * m + 3.3333331174e-1f;
    const float z = m * m;
    return m + (m * z * p - 2.12194440e-4f * e - 0.5f * z) + 0.693359375f * e;
}

DEV float exp_(float x) { return exp2_(x * 1.44269504f); }

// Converts a random 32-bit word to a number that is uniformly distributed in (0, 1).
DEV float uniform(u32 word) { return fmin_(((float)word + 0.5f) * 2.3283064365386963e-10f, 1.f - 5.9604644775390625e-8f); }

// Returns standard Gumbel noise -ln(-ln(1 - u)), u = uniform(word). It decreases as `word` grows.
DEV float gumbel(u32 word) {
    const float u = uniform(word), rest = 1.f - u;
    // Corrects ln(1 - u) for the rounding error of rest = 1 - u, by the factor u / (1 - rest).
    const float e = rest == 1.f ? u : -ln(rest) * (u / (1.f - rest));
    return -ln(e);
}

// Returns gumbel() to within GUMBEL_SLACK, in a third of the time.
#define GUMBEL_SLACK 1e-3f
DEV float gumbel_approx(u32 word) {
    const float u = uniform(word);
    const float e = u < 0.015625f ? u * (1.f + u * (0.5f + u * 0.33333333f)) : -0.69314718f * log2_(1.f - u);
    return -0.69314718f * log2_(e);
}
