// elementwise_scale.hip - multiplication by a scalar, and addition of gated rows. CPU reference: cpu/elementwise.rs.
//
// elementwise_scale      x = factor * x                 [rows, cols] of ACT, in place
// elementwise_gated_add  y = y + sigmoid(gate) * x      y, x [rows, cols] of ACT; gate f32 [rows], row stride gate_stride
// Grid and block: as elementwise. Rounding: computed in f32, rounded once at the store. Roofline: bytes of inputs and
// outputs over memory bandwidth; a single row is latency-bound.
#include "dev.h"
#include "elementwise/elementwise.h"

KERNEL(256) elementwise_scale(ACT* x, u32 cols, u32 parts, u32 stride, float factor) {
    grid_wait();
    grid_launch_dependents();
    ACT* row = x + u64(bid_x() / parts) * stride;
    each_column(
        cols, parts, ((u64)row & 15) == 0,
        [=](u32 c) {
            f32x8 v = load8(row + c);
            for (u32 i = 0; i < 8; ++i) v.v[i] *= factor;
            store8(row + c, v);
        },
        [=](u32 c) { row[c] = to<ACT>(f32(row[c]) * factor); });
}
EXPORT(elementwise_scale)

KERNEL(256)
elementwise_gated_add(ACT* y, const ACT* x, const float* gate, u32 cols, u32 parts, u32 y_stride, u32 x_stride, u32 gate_stride) {
    grid_wait();
    grid_launch_dependents();
    const u64 row = bid_x() / parts;
    ACT* to_row = y + row * y_stride;
    const ACT* from = x + row * x_stride;
    const float share = rcp_(1.f + exp2_(-1.44269504f * gate[row * gate_stride]));
    each_column(
        cols, parts, (((u64)to_row | (u64)from) & 15) == 0,
        [=](u32 c) {
            f32x8 sum = load8(to_row + c);
            const f32x8 v = load8(from + c);
            for (u32 i = 0; i < 8; ++i) sum.v[i] = fma_(share, v.v[i], sum.v[i]);
            store8(to_row + c, sum);
        },
        [=](u32 c) { to_row[c] = to<ACT>(fma_(share, f32(from[c]), f32(to_row[c]))); });
}
EXPORT(elementwise_gated_add)
