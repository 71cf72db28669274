// fp8_quantize.hip - quantises rows of x for GEMMs with fp8 weights, and converts the weights' fp8 format.
//
// fp8_quantize_rows y [rows, cols] of fp8 = x / scale, rounded. Scales f32: one per row and 128 columns,
//                   [cols / 128, scale_stride]; with CHANNELS one per row, [rows]. SCALING (quantize.h) selects
//                   the rule of the scales. Rows from `rows` to gdim_x() are zero.
// fp8_quantize_rows_static  with SCALING=2: all scales are `static_scale`, [cols / 128, scale_stride]. The first of
//                   these rows is also the form of CHANNELS, so -DCHANNELS=1 is not needed.
// scale_rows_to_f16 y [rows, cols] of f16 = x times a power of two per row; the inverse is written to factors
//                   [rows].
// fp8_to_fnuz        converts OCP fp8 to the target's format in place. For FNUZ, negative zero becomes zero;
//                    other bits are kept and then represent half of the value, which the GEMM kernels
//                    correct.
// Grid: rows (fp8_to_fnuz: any size). Block: 256. cols is a multiple of 8, rows of x are aligned to 16 bytes.
// -DCHANNELS=1, -DSCALING=0|1|2
// Roofline: 3 bytes per value over bandwidth; one row is latency-bound.
#include "dev.h"
#include "dev/fp8_f16.h"
#include "fp8_quantize/quantize.h"

#ifndef CHANNELS
#  define CHANNELS 0
#endif

#if SCALING == 2
// Quantises a row of x with the given scale, which does not depend on the values of the row. If the target's
// fp8 format is FNUZ, twice the scale is used: FNUZ values up to 224 have the bits of OCP values up to 448.
DEV void quantize_with_scale(fp8* y, float* scales, const half_t* x, u32 cols, u32 scale_stride, bool valid, float scale) {
    for (u32 c = tid() * 8; c < cols; c += bdim() * 8) {
        f32x8 v{};
        if (valid) v = load8(x + c);
        *(fp8x8*)(y + c) = quantized_saturating(v, 1.f / scale);
    }
    const u32 count = (cols + QUANT_BLOCK - 1) / QUANT_BLOCK;
    for (u32 i = tid(); i < count; i += bdim()) scales[(u64)i * scale_stride] = scale;
}

KERNEL(256)
fp8_quantize_rows_static(fp8* y, float* scales, const half_t* x, u32 rows, u32 cols, u32 x_stride, u32 scale_stride,
                         float static_scale) {
    grid_launch_dependents();
    grid_wait();
    const u64 row = bid_x();
    const float scale = target_scale(static_scale);
    quantize_with_scale(y + row * cols, scales + row, x + row * x_stride, cols, scale_stride, row < rows, scale);
}
EXPORT(fp8_quantize_rows_static)
#else

KERNEL(256) fp8_quantize_rows(fp8* y, float* scales, const half_t* x, u32 rows, u32 cols, u32 x_stride, u32 scale_stride) {
    grid_launch_dependents();
    grid_wait();
    const u64 row = bid_x();
    const bool valid = row < rows;
    const half_t* from = x + row * x_stride;
    fp8* to = y + row * cols;
    f32x8 none;
    UNROLL for (u32 i = 0; i < 8; ++i) none.v[i] = 0.f;
#  if CHANNELS
    float peak = 0.f;
    for (u32 c = tid() * 8; c < cols; c += bdim() * 8)
        if (valid) peak = fmax_(peak, peak_of(load8(from + c)));
    const float scale = scale_of(block_max(peak));
    if (tid() == 0) scales[row] = scale;
    for (u32 c = tid() * 8; c < cols; c += bdim() * 8)
        *(fp8x8*)(to + c) = quantized(valid ? load8(from + c) : none, 1.f / scale);
#  else
    // All QUANT_LANES lanes of a quantisation block run every iteration, because they reduce their largest
    // magnitude together; lanes beyond the last column use zeros.
    const u32 padded = (cols + QUANT_BLOCK - 1) / QUANT_BLOCK * QUANT_BLOCK;
    for (u32 at = 0; at < padded; at += bdim() * 8) {
        const u32 c = at + tid() * 8;
        const f32x8 v = valid && c < cols ? load8(from + c) : none;
        const float scale = scale_of(group_max<QUANT_LANES>(peak_of(v)));
        if (c < cols) *(fp8x8*)(to + c) = quantized(v, 1.f / scale);
        if (c < padded && tid() % QUANT_LANES == 0) scales[(u64)(c / QUANT_BLOCK) * scale_stride + row] = scale;
    }
#  endif
}
EXPORT(fp8_quantize_rows)
#endif

#if WARP_SIZE == 32
KERNEL(256) scale_rows_to_f16(u32x4* y, float* factors, const half_t* x, u32 cols, u32 x_stride) {
    grid_launch_dependents();
    grid_wait();
    const u64 row = bid_x();
    const half_x8* from = (const half_x8*)(x + row * x_stride);
    float peak = 0.f;
    for (u32 p = tid(); p < cols / 8; p += bdim()) peak = peak_of(from[p], peak);
    const RowScaleFactors factor = row_factor(block_max(peak));
    if (tid() == 0) factors[row] = factor.down;
    for (u32 p = tid(); p < cols / 8; p += bdim()) y[row * (cols / 8) + p] = scaled_f16(from[p], factor.up);
}
EXPORT(scale_rows_to_f16)
#endif

KERNEL(256) fp8_to_fnuz(u32* words, u32 count) {
#if FP8_FNUZ
    for (u32 i = bid_x() * bdim() + tid(); i < count; i += gdim_x() * bdim()) {
        u32 w = words[i];
        UNROLL for (u32 b = 0; b < 32; b += 8)
            if ((w >> b & 0xffu) == 0x80u) w &= ~(0xffu << b);
        words[i] = w;
    }
#endif
}
EXPORT(fp8_to_fnuz)
