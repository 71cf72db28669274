// norm.hip - RMS norm of rows, with or without an addend to the residual stream. CPU twin: cpu/norm.rs.
//
// rms_norm      y = w * act(x * rsqrt(mean(x^2) + eps))       x, y [rows, cols] of ACT, w [cols] of ACT
// add_rms_norm  x += delta, rounded in place; then rms_norm   delta [rows, cols] of ACT
// Grid: rows. Block: a multiple of WAVE up to 512 that depends on cols alone, so that a row's sum has one order in every batch.
// Rounding points: norm.h.
// A thread keeps its 8-wide pieces of the row in registers between the sum and the store (up to 4 of them); rows that
// are longer, or not made of aligned eights, are read again. The weight is read before the kernel waits for its
// predecessor. Roofline: 2 (norm) or 4 (add + norm) row lengths over bandwidth; one row is latency: load, reduce, store.
#include "dev.h"
#include "norm/norm.h"

template <u32 PIECES, bool ADD>
DEV void norm_in_registers(ACT* y, ACT* x, const ACT* delta, const ACT* w, u32 cols, float eps) {
    f32x8 v[PIECES], weight[PIECES];
    for (u32 p = 0; p < PIECES; ++p) {
        const u32 c = (p * bdim() + tid()) * 8;
        if (c < cols) weight[p] = load8(w + c);
    }
    grid_release();
    grid_wait();
    float squares = 0.f;
    for (u32 p = 0; p < PIECES; ++p) {
        const u32 c = (p * bdim() + tid()) * 8;
        if (c >= cols) continue;
        v[p] = load8(x + c);
        if constexpr (ADD) {
            const f32x8 d = load8(delta + c);
            for (u32 i = 0; i < 8; ++i) v[p].v[i] = residual_sum(v[p].v[i], d.v[i]);
            store8(x + c, v[p]);
        }
    }
    for (u32 p = 0; p < PIECES; ++p) {
        if ((p * bdim() + tid()) * 8 >= cols) continue;
        for (u32 i = 0; i < 8; ++i) squares += v[p].v[i] * v[p].v[i];
    }
    const float scale = inverse_rms(block_sum(squares), cols, eps);
    for (u32 p = 0; p < PIECES; ++p) {
        const u32 c = (p * bdim() + tid()) * 8;
        if (c >= cols) continue;
        for (u32 i = 0; i < 8; ++i) v[p].v[i] = normed(v[p].v[i], scale, weight[p].v[i]);
        store8(y + c, v[p]);
    }
}

template <bool ADD> DEV void norm_from_memory(ACT* y, ACT* x, const ACT* delta, const ACT* w, u32 cols, float eps) {
    grid_release();
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

// Strides are in elements.
template <bool ADD>
DEV void norm_row(ACT* y, ACT* x, const ACT* delta, const ACT* w, u32 cols, u32 y_stride, u32 x_stride,
                  u32 delta_stride, float eps) {
    const u64 row = bid_x();
    y += row * y_stride;
    x += row * x_stride;
    if constexpr (ADD) delta += row * delta_stride;
    const u64 addresses = (u64)y | (u64)x | (u64)w | (ADD ? (u64)delta : 0);
    const bool wide = (addresses & 15) == 0 && cols % 8 == 0;
    const u32 span = bdim() * 8;
    if (wide && cols <= span)
        norm_in_registers<1, ADD>(y, x, delta, w, cols, eps);
    else if (wide && cols <= 2 * span)
        norm_in_registers<2, ADD>(y, x, delta, w, cols, eps);
    else if (wide && cols <= 4 * span)
        norm_in_registers<4, ADD>(y, x, delta, w, cols, eps);
    else
        norm_from_memory<ADD>(y, x, delta, w, cols, eps);
}

KERNEL(512) rms_norm(ACT* y, const ACT* x, const ACT* w, u32 cols, u32 y_stride, u32 x_stride, float eps) {
    norm_row<false>(y, (ACT*)x, nullptr, w, cols, y_stride, x_stride, 0, eps);
}
EXPORT(rms_norm)

KERNEL(512)
add_rms_norm(ACT* y, ACT* x, const ACT* delta, const ACT* w, u32 cols, u32 y_stride, u32 x_stride, u32 delta_stride,
             float eps) {
    norm_row<true>(y, x, delta, w, cols, y_stride, x_stride, delta_stride, eps);
}
EXPORT(add_rms_norm)
