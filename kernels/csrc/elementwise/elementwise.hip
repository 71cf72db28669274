// elementwise.hip - activations and additions. CPU reference: cpu/elementwise.rs.
//
// gated_activation_rows  y = activation of gate and up (dev/gate.h)   y [rows, cols], x [rows, 2 cols]: gate columns,
//                then up columns; all of ACT
// gated_product_rows     y = activation of gate and up, which are separate   all [rows, cols] of ACT
// -DGATE, -DGATE_ALPHA, -DGATE_LIMIT   see dev/gate.h
// -DFP8=1        compiles gated_activation_fp8 only: y in fp8 with scales of -DSCALING, as fp8_quantize_rows would
//                quantise the half_t result. Rows from `rows` on are zero. cols is a multiple of the quantisation
//                block, rows are aligned to 16 bytes, ACT is half_t. Block: 128; one group of 8 columns per thread.
// add_rows       y = a + b               all [rows, cols] of ACT
// elementwise_softcap  x = cap * tanh(x / cap)  [rows, cols] of ACT, in place; tanh z = 1 - 2 / (e^2z + 1)
// Grid: rows * parts blocks, where block b processes part b % parts of row b / parts: every `parts`-th run of
// bdim() groups of 8 columns. Block: a multiple of WARP_SIZE up to 256.
// Rounding: computed in f32, rounded once at the store. Roofline: bytes of two inputs and one output over
// memory bandwidth; a single row is latency-bound.
#include "dev.h"
#include "dev/gate.h"
#include "elementwise/elementwise.h"
#ifndef FP8
#  define FP8 0
#endif

DEV f32x8 gated_products(const f32x8& gate, const f32x8& up) {
    f32x8 r;
    for (u32 i = 0; i < 8; ++i) r.v[i] = activated(gate.v[i]) * up_factor(up.v[i]);
    return r;
}
#if FP8
#  include "fp8_quantize/quantize.h"

KERNEL(256)
gated_activation_fp8(fp8* y, float* scales, const ACT* x, u32 rows, u32 cols, u32 parts, u32 x_stride, u32 scale_stride,
             float static_scale) {
    grid_wait();
    grid_launch_dependents();
    const u64 row = bid_x() / parts;
    const u32 c = (bid_x() % parts * bdim() + tid()) * 8;
    f32x8 v{};
    if (row < rows && c < cols) {
        const ACT *gate = x + row * x_stride + c, *up = gate + cols;
        v = gated_products(load8(gate), load8(up));
        for (u32 i = 0; i < 8; ++i) v.v[i] = f32(to_half(v.v[i]));
    }
    store_quantized(QuantizedOutput{y, scales, scale_stride, static_scale}, row, cols, c, v);
}
EXPORT(gated_activation_fp8)
#else

// Arguments whose names end in `stride` are in elements.
KERNEL(256) gated_activation_rows(ACT* y, const ACT* x, u32 cols, u32 parts, u32 y_stride, u32 x_stride) {
    grid_wait();
    grid_launch_dependents();
    const u64 row = bid_x() / parts;
    ACT* to_row = y + row * y_stride;
    const ACT *gate = x + row * x_stride, *up = gate + cols;
    const bool aligned = (((u64)to_row | (u64)gate | (u64)up) & 15) == 0;
    each_column(
        cols, parts, aligned, [=](u32 c) { store8(to_row + c, gated_products(load8(gate + c), load8(up + c))); },
        [=](u32 c) { to_row[c] = to<ACT>(activated(f32(gate[c])) * up_factor(f32(up[c]))); });
}
EXPORT(gated_activation_rows)

KERNEL(256)
gated_product_rows(ACT* y, const ACT* gate, const ACT* up, u32 cols, u32 parts, u32 y_stride, u32 gate_stride,
                   u32 up_stride) {
    grid_wait();
    grid_launch_dependents();
    const u64 row = bid_x() / parts;
    ACT* to_row = y + row * y_stride;
    const ACT *gates = gate + row * gate_stride, *factors = up + row * up_stride;
    const bool aligned = (((u64)to_row | (u64)gates | (u64)factors) & 15) == 0;
    each_column(
        cols, parts, aligned, [=](u32 c) { store8(to_row + c, gated_products(load8(gates + c), load8(factors + c))); },
        [=](u32 c) { to_row[c] = to<ACT>(activated(f32(gates[c])) * up_factor(f32(factors[c]))); });
}
EXPORT(gated_product_rows)

KERNEL(256)
add_rows(ACT* y, const ACT* a, const ACT* b, u32 cols, u32 parts, u32 y_stride, u32 a_stride, u32 b_stride) {
    grid_wait();
    grid_launch_dependents();
    const u64 row = bid_x() / parts;
    ACT* to_row = y + row * y_stride;
    const ACT *left = a + row * a_stride, *right = b + row * b_stride;
    const bool aligned = (((u64)to_row | (u64)left | (u64)right) & 15) == 0;
    each_column(
        cols, parts, aligned,
        [=](u32 c) {
            const f32x8 l = load8(left + c), r = load8(right + c);
            f32x8 sum;
            for (u32 i = 0; i < 8; ++i) sum.v[i] = l.v[i] + r.v[i];
            store8(to_row + c, sum);
        },
        [=](u32 c) { to_row[c] = to<ACT>(f32(left[c]) + f32(right[c])); });
}
EXPORT(add_rows)

KERNEL(256) elementwise_softcap(ACT* x, u32 cols, u32 parts, u32 stride, float cap) {
    grid_wait();
    grid_launch_dependents();
    ACT* row = x + u64(bid_x() / parts) * stride;
    const float scale = 2.f * 1.44269504f / cap;
    auto capped = [=](float v) { return cap * (1.f - 2.f * rcp_(1.f + exp2_(v * scale))); };
    each_column(
        cols, parts, ((u64)row & 15) == 0,
        [=](u32 c) {
            f32x8 v = load8(row + c);
            for (u32 i = 0; i < 8; ++i) v.v[i] = capped(v.v[i]);
            store8(row + c, v);
        },
        [=](u32 c) { row[c] = to<ACT>(capped(f32(row[c]))); });
}
EXPORT(elementwise_softcap)
#endif
