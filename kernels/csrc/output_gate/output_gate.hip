// output_gate.hip - gates of the outputs of attention and of gated delta nets. CPU reference: cpu/recurrent.rs.
//
// elementwise_output_gate  x = x * sigmoid(gate), in place     x, gate [rows, cols] of ACT
// rms_norm_gated           y = w * ACT(x * rsqrt(mean(x^2) + eps)) * silu(z) for each head of head_dim channels
//                          x, y, z [rows, heads * head_dim] of ACT; w f32 [head_dim]
// Grid: elementwise_output_gate as elementwise; rms_norm_gated: ceil(rows * heads / warps per block) blocks, one head of
// a row per warp. Rounding: computed in f32, rounded once at the store, the normalised x also before the weight.
// Roofline: bytes of inputs and outputs over memory bandwidth; a single row is latency-bound.
#include "dev.h"
#include "dev/vector4.h"
#include "elementwise/elementwise.h"

DEV float sigmoid(float x) { return rcp_(1.f + exp2_(-1.44269504f * x)); }

KERNEL(256) elementwise_output_gate(ACT* x, const ACT* gate, u32 cols, u32 parts, u32 x_stride, u32 gate_stride) {
    grid_wait();
    grid_launch_dependents();
    const u64 row = bid_x() / parts;
    ACT* to_row = x + row * x_stride;
    const ACT* gates = gate + row * gate_stride;
    each_column(
        cols, parts, (((u64)to_row | (u64)gates) & 15) == 0,
        [=](u32 c) {
            f32x8 v = load8(to_row + c);
            const f32x8 g = load8(gates + c);
            for (u32 i = 0; i < 8; ++i) v.v[i] *= sigmoid(g.v[i]);
            store8(to_row + c, v);
        },
        [=](u32 c) { to_row[c] = to<ACT>(f32(to_row[c]) * sigmoid(f32(gates[c]))); });
}
EXPORT(elementwise_output_gate)

KERNEL(128)
rms_norm_gated(ACT* y, const ACT* x, const ACT* z, const float* w, u32 rows, u32 heads, u32 head_dim, u32 y_stride,
               u32 x_stride, u32 z_stride, float eps) {
    grid_wait();
    grid_launch_dependents();
    const u32 unit = bid_x() * (bdim() / WARP_SIZE) + warp_id();
    if (unit >= rows * heads) return;
    const u64 row = unit / heads;
    const u32 at = unit % heads * head_dim;
    const ACT *from = x + row * x_stride + at, *gate = z + row * z_stride + at;
    ACT* out = y + row * y_stride + at;
    const auto gated = [=](float value, float scale, float weight, float g) {
        return weight * f32(to<ACT>(value * scale)) * g * sigmoid(g);
    };
    float sum = 0.f;
    if (((head_dim | y_stride | x_stride | z_stride) & 3) == 0 && (((u64)y | (u64)x | (u64)z | (u64)w) & 15) == 0) {
        const u32 first = lane() * 4, step = WARP_SIZE * 4;
        for (u32 c = first; c < head_dim; c += step) {
            const f32x4 v = load4(from + c);
            UNROLL for (u32 i = 0; i < 4; ++i) sum = fma_(v.v[i], v.v[i], sum);
        }
        const float scale = rsqrt_(warp_sum(sum) / (float)head_dim + eps);
        for (u32 c = first; c < head_dim; c += step) {
            const f32x4 v = load4(from + c), g = load4(gate + c), weight = load4(w + c);
            f32x4 r;
            UNROLL for (u32 i = 0; i < 4; ++i) r.v[i] = gated(v.v[i], scale, weight.v[i], g.v[i]);
            store4(out + c, r);
        }
        return;
    }
    for (u32 c = lane(); c < head_dim; c += WARP_SIZE) sum = fma_(f32(from[c]), f32(from[c]), sum);
    const float scale = rsqrt_(warp_sum(sum) / (float)head_dim + eps);
    for (u32 c = lane(); c < head_dim; c += WARP_SIZE) out[c] = to<ACT>(gated(f32(from[c]), scale, w[c], f32(gate[c])));
}
EXPORT(rms_norm_gated)
