// fp8_quantize/quantize.h - quantises values of x to fp8 with scales, for fp8_quantize_rows and for kernels
// that quantise their output.
//
// A scale applies to QUANT_BLOCK columns of a row, which QUANT_LANES adjacent lanes have (eight values each), or to
// a whole row. CPU reference: ActivationScaling::scale.
// -DSCALING=0  the largest magnitude divided by TARGET, or 1 if all values are zero
// -DSCALING=1  max(largest magnitude, 1e-4) / TARGET, rounded up to a power of two (ue8m0; act_quant in
//              DeepSeek-V3.1 inference/kernel.py)
// -DSCALING=2  a kernel argument; quantised values saturate
#pragma once

#ifndef SCALING
#  define SCALING 0
#endif

enum : u32 { QUANT_LANES = 16, QUANT_BLOCK = QUANT_LANES * 8 };
// Value to which the largest magnitude of a quantisation block is scaled: 448, or 224 in FNUZ, where the same
// bits represent half of the OCP value.
#define TARGET (FP8_FNUZ ? 224.0f : 448.0f)

DEV fp8x8 quantized(const f32x8& x, float factor) {
    f32x8 r;
    for (u32 i = 0; i < 8; ++i) r.v[i] = x.v[i] * factor;
    return narrow_fp8(r);
}
// Returns the scale of a quantisation block whose largest magnitude is `peak`. With SCALING=0 the scale is 1
// if `peak` is at most 1e-30, because a smaller scale would have no finite inverse; the quantised values are
// then zero.
#if SCALING == 1
DEV float scale_of(float peak) {
    const u32 mantissa = 0x7fffffu;
    return as_f32((as_u32(fmax_(peak, 1e-4f) * (1.f / TARGET)) + mantissa) & ~mantissa);
}
#else
DEV float scale_of(float peak) { return peak > 1e-30f ? peak * (1.f / TARGET) : 1.f; }
#endif
// Quantises `x` with a scale that does not depend on the values: values beyond TARGET saturate, NaN is kept.
DEV fp8x8 quantized_saturating(const f32x8& x, float factor) {
    f32x8 r;
    for (u32 i = 0; i < 8; ++i) {
        const float q = x.v[i] * factor;
        r.v[i] = q > TARGET ? TARGET : q < -TARGET ? -TARGET : q;
    }
    return narrow_fp8(r);
}
// Converts a static scale of OCP fp8 to the scale of the target's format.
DEV float target_scale(float static_scale) { return static_scale * (448.f / TARGET); }
DEV float peak_of(const f32x8& x) {
    float peak = 0.f;
    for (u32 i = 0; i < 8; ++i) peak = fmax_(peak, fabs_(x.v[i]));
    return peak;
}

// Destination of store_quantized(), which quantises the eight values `v` of columns [c, c + 8) of a row. `v`
// is already rounded to half_t, as if it had been stored before quantisation; it must be zero for columns
// beyond the last column and for rows out of range. Every lane of the warp must call store_quantized().
// `cols` is a multiple of QUANT_BLOCK.
struct QuantizedOutput {
    fp8* y;              // [rows, cols]
    float* scales;       // [cols / QUANT_BLOCK, scale_stride]
    u32 scale_stride;
    float static_scale;  // for OCP fp8; unused without SCALING=2
};
DEV void store_quantized(const QuantizedOutput& to, u64 row, u32 cols, u32 c, const f32x8& v) {
#if SCALING == 2
    const float scale = target_scale(to.static_scale);
    if (c >= cols) return;
    *(fp8x8*)(to.y + row * cols + c) = quantized_saturating(v, 1.f / scale);
#else
    const float scale = scale_of(group_max<QUANT_LANES>(peak_of(v)));
    if (c >= cols) return;
    *(fp8x8*)(to.y + row * cols + c) = quantized(v, 1.f / scale);
#endif
    if (c % QUANT_BLOCK == 0) to.scales[(u64)(c / QUANT_BLOCK) * to.scale_stride + row] = scale;
}
