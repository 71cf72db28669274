// norm.hip - RMS norm of rows, with or without an addition to the residual stream. CPU reference:
// cpu/norm.rs.
//
// rms_norm      y = w * act(x * rsqrt(mean(x^2) + eps))       x, y [rows, cols] of ACT, w [cols] of ACT, or f32
//               with -DNORM_F32=1
// add_rms_norm  x += delta, rounded in place; then rms_norm   delta [rows, cols] of ACT
// -DFP8=1       compiles add_rms_norm_fp8 only: y in fp8 with scales of -DSCALING, as fp8_quantize_rows would
//               quantise the half_t result; rows from `rows` to gdim_x() are zero. Rows consist of whole
//               quantisation blocks and are aligned to 16 bytes, ACT is half_t. -DTHREAD_EIGHTS=1|2|4: groups
//               of 8 columns per thread
// Grid: rows. Block: a multiple of WARP_SIZE up to 512 that depends only on cols, so that a row's sum has one
// order in every batch. Rounding points: norm.h. A thread keeps up to 4 groups of 8 columns of the row in
// registers between the sum of squares and the store; longer or unaligned rows are read twice. The weight is
// loaded before grid_wait(). Roofline: 2 (rms_norm) or 4 (add_rms_norm) times the bytes of a row, per row,
// over memory bandwidth; a single row is latency-bound.
#include "dev.h"
#include "norm/norm.h"
#include "norm/row.h"
#ifndef FP8
#  define FP8 0
#endif
#if FP8
#  include "fp8_quantize/quantize.h"
#endif

#if FP8
// Adds `delta` to the row of x, normalises the sum and stores it quantised to fp8. Rows from `rows` on are
// padding: zeros are written, and nothing is read.
DEV void norm_quantized(const QuantizedOutput& to, ACT* x, const ACT* delta, const NORM_WEIGHT* w, u32 rows, u32 cols,
                        float eps) {
    const u64 row = bid_x();
    const u32 span = bdim() * 8;
    const auto put = [&](u32 c, f32x8 v) {
        for (u32 i = 0; i < 8; ++i) v.v[i] = c < cols && row < rows ? f32(to_half(v.v[i])) : 0.f;
        store_quantized(to, row, cols, c, v);
    };
    if (row >= rows) {
        grid_launch_dependents();
        grid_wait();
        for (u32 c = tid() * 8; c - tid() * 8 < cols; c += span) put(c, f32x8{});
    } else {
        norm_in_registers<THREAD_EIGHTS, true>(x, w, cols, eps, AddendRow{delta, cols}, put);
    }
}

KERNEL(512)
add_rms_norm_fp8(fp8* y, float* scales, ACT* x, const ACT* delta, const NORM_WEIGHT* w, u32 rows, u32 cols, u32 x_stride,
                 u32 delta_stride, u32 scale_stride, float eps, float static_scale) {
    const u64 row = bid_x();
    norm_quantized(QuantizedOutput{y, scales, scale_stride, static_scale}, x + row * x_stride,
                   delta + row * delta_stride, w, rows, cols, eps);
}
EXPORT(add_rms_norm_fp8)
#else

template <bool ADD> DEV void norm_from_memory(ACT* y, ACT* x, const ACT* delta, const NORM_WEIGHT* w, u32 cols, float eps) {
    grid_launch_dependents();
    grid_wait();
    float squares = 0.f;
    for (u32 c = tid(); c < cols; c += bdim()) {
        float v = f32(x[c]);
        if constexpr (ADD) {
            v = residual_sum(v, f32(delta[c]));
            x[c] = to<ACT>(v);
        }
        squares += v * v;
    }
    const float scale = inverse_rms(block_sum(squares), cols, eps);
    for (u32 c = tid(); c < cols; c += bdim()) y[c] = to<ACT>(normed(f32(x[c]), scale, f32(w[c])));
}

// Arguments whose names end in `stride` are in elements.
template <bool ADD>
DEV void norm_row(ACT* y, ACT* x, const ACT* delta, const NORM_WEIGHT* w, u32 cols, u32 y_stride, u32 x_stride,
                  u32 delta_stride, float eps) {
    const u64 row = bid_x();
    y += row * y_stride;
    x += row * x_stride;
    if constexpr (ADD) delta += row * delta_stride;
    const u64 addresses = (u64)y | (u64)x | (u64)w | (ADD ? (u64)delta : 0);
    const bool wide = (addresses & 15) == 0 && cols % 8 == 0;
    const u32 span = bdim() * 8;
    const auto put = [=](u32 c, const f32x8& v) {
        if (c < cols) store8(y + c, v);
    };
    const AddendRow addends{delta, cols};
    if (wide && cols <= span)
        norm_in_registers<1, ADD>(x, w, cols, eps, addends, put);
    else if (wide && cols <= 2 * span)
        norm_in_registers<2, ADD>(x, w, cols, eps, addends, put);
    else if (wide && cols <= 4 * span)
        norm_in_registers<4, ADD>(x, w, cols, eps, addends, put);
    else
        norm_from_memory<ADD>(y, x, delta, w, cols, eps);
}

KERNEL(512) rms_norm(ACT* y, const ACT* x, const NORM_WEIGHT* w, u32 cols, u32 y_stride, u32 x_stride, float eps) {
    norm_row<false>(y, (ACT*)x, nullptr, w, cols, y_stride, x_stride, 0, eps);
}
EXPORT(rms_norm)

KERNEL(512)
add_rms_norm(ACT* y, ACT* x, const ACT* delta, const NORM_WEIGHT* w, u32 cols, u32 y_stride, u32 x_stride, u32 delta_stride,
             float eps) {
    norm_row<true>(y, x, delta, w, cols, y_stride, x_stride, delta_stride, eps);
}
EXPORT(add_rms_norm)
#endif
