// qk_norm.hip - QK norm over all heads, attention temperature, and norm of value heads, between the QKV projection and
// RoPE. CPU reference: cpu/norm.rs, cpu/elementwise.rs.
//
// qk_square_sums  sums f32 [tokens, 2] = sums of squares of the query channels, and of the key channels
// qk_full_norm    q = w * q * rsqrt(sums[0] / query_count + eps), k likewise with sums[1]; in place
// qk_temperature  q = factors[positions[token]] * q, in place; factors f32 [positions], positions i32 [tokens]
// value_head_norm v = v * rsqrt(mean(v^2) + eps) for each head of head_dim channels from channel `first` on, in place
//   qkv [tokens, query_cols + key_cols + value channels] of ACT; w [query_cols + key_cols] of ACT
// Grid: qk_square_sums: 2 * tokens blocks of 256 threads, so that a sum has one order in every batch;
// value_head_norm: ceil(tokens * heads / warps per block) blocks, one head of a token per warp; others: as elementwise.
// Rounding: computed in f32, rounded once at the store. Roofline: bytes of the query and key channels, read
// (qk_square_sums) or read and written, over memory bandwidth; a single token is latency-bound.
#include "dev.h"
#include "elementwise/elementwise.h"

KERNEL(256) qk_square_sums(float* sums, const ACT* qkv, u32 query_cols, u32 key_cols, u32 stride) {
    grid_launch_dependents();
    grid_wait();
    const bool is_key = bid_x() % 2 != 0;
    const u32 cols = is_key ? key_cols : query_cols;
    const ACT* x = qkv + u64(bid_x() / 2) * stride + (is_key ? query_cols : 0);
    float sum = 0.f;
    if (((u64)x & 15) == 0 && cols % 8 == 0) {
        for (u32 c = tid() * 8; c < cols; c += bdim() * 8) {
            const f32x8 v = load8(x + c);
            for (u32 i = 0; i < 8; ++i) sum = fma_(v.v[i], v.v[i], sum);
        }
    } else {
        for (u32 c = tid(); c < cols; c += bdim()) sum = fma_(f32(x[c]), f32(x[c]), sum);
    }
    sum = block_sum(sum);
    if (tid() == 0) sums[bid_x()] = sum;
}
EXPORT(qk_square_sums)

// query_count and key_count are the numbers of channels over all ranks whose squares `sums` contains.
KERNEL(256)
qk_full_norm(ACT* qkv, const float* sums, const ACT* w, u32 query_cols, u32 cols, u32 parts, u32 stride,
             float query_count, float key_count, float eps) {
    grid_wait();
    grid_launch_dependents();
    const u32 row = bid_x() / parts;
    ACT* x = qkv + (u64)row * stride;
    const float query_scale = rsqrt_(sums[2 * row] / query_count + eps);
    const float key_scale = rsqrt_(sums[2 * row + 1] / key_count + eps);
    each_column(
        cols, parts, (((u64)x | (u64)w) & 15) == 0 && query_cols % 8 == 0,
        [=](u32 c) {
            f32x8 v = load8(x + c);
            const f32x8 weight = load8(w + c);
            const float scale = c < query_cols ? query_scale : key_scale;
            for (u32 i = 0; i < 8; ++i) v.v[i] = weight.v[i] * (v.v[i] * scale);
            store8(x + c, v);
        },
        [=](u32 c) { x[c] = to<ACT>(f32(w[c]) * (f32(x[c]) * (c < query_cols ? query_scale : key_scale))); });
}
EXPORT(qk_full_norm)

KERNEL(256) qk_temperature(ACT* qkv, const float* factors, const i32* positions, u32 cols, u32 parts, u32 stride) {
    grid_wait();
    grid_launch_dependents();
    const u32 row = bid_x() / parts;
    ACT* x = qkv + (u64)row * stride;
    const float factor = factors[positions[row]];
    each_column(
        cols, parts, ((u64)x & 15) == 0,
        [=](u32 c) {
            f32x8 v = load8(x + c);
            for (u32 i = 0; i < 8; ++i) v.v[i] *= factor;
            store8(x + c, v);
        },
        [=](u32 c) { x[c] = to<ACT>(f32(x[c]) * factor); });
}
EXPORT(qk_temperature)

KERNEL(256)
value_head_norm(ACT* qkv, u32 tokens, u32 heads, u32 head_dim, u32 first, u32 stride, float eps) {
    grid_wait();
    grid_launch_dependents();
    const u32 unit = bid_x() * (bdim() / WARP_SIZE) + warp_id();
    if (unit >= tokens * heads) return;
    ACT* x = qkv + u64(unit / heads) * stride + first + unit % heads * head_dim;
    float sum = 0.f;
    if (((u64)x & 15) == 0 && head_dim % 8 == 0) {
        for (u32 c = lane() * 8; c < head_dim; c += WARP_SIZE * 8) {
            const f32x8 v = load8(x + c);
            for (u32 i = 0; i < 8; ++i) sum = fma_(v.v[i], v.v[i], sum);
        }
        const float scale = rsqrt_(warp_sum(sum) / (float)head_dim + eps);
        for (u32 c = lane() * 8; c < head_dim; c += WARP_SIZE * 8) {
            f32x8 v = load8(x + c);
            for (u32 i = 0; i < 8; ++i) v.v[i] *= scale;
            store8(x + c, v);
        }
    } else {
        for (u32 c = lane(); c < head_dim; c += WARP_SIZE) sum = fma_(f32(x[c]), f32(x[c]), sum);
        const float scale = rsqrt_(warp_sum(sum) / (float)head_dim + eps);
        for (u32 c = lane(); c < head_dim; c += WARP_SIZE) x[c] = to<ACT>(f32(x[c]) * scale);
    }
}
EXPORT(value_head_norm)
