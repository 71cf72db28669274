// mla_kv_write.hip - KV write and RoPE of MLA, between the projections and attention. CPU reference:
// cpu/mla/kv_write.rs.
//
// mla_kv_write  writes [norm(c) | rope(k)] to the pool row of each token's slot, where [c | k] is the token's
// row of kv [tokens, KV_LORA_RANK + QK_ROPE_HEAD_DIM]; slot < 0 stores nothing. RoPE is applied in place to
// the last QK_ROPE_HEAD_DIM channels of every head of q [tokens, heads * width].
//   norm [KV_LORA_RANK] of ACT; cos, sin f32 [positions, QK_ROPE_HEAD_DIM / 2]; positions i32, slots i64 [tokens]
//   pool: KV pool of one layer, [slot][KV_LORA_RANK + QK_ROPE_HEAD_DIM] of ACT
// RoPE pairs channels 2 i and 2 i + 1 (interleaved).
// Defines: -DKV_LORA_RANK, -DQK_ROPE_HEAD_DIM, -DACT_F32. Grid: tokens. Block: 256.
// Rounding: compressed KV once when normalised and once when multiplied by its weight; rotated channels once.
// Roofline: bytes of kv and of q's rotary channels over memory bandwidth; a single token is latency-bound.
#include "dev.h"
#include "norm/norm.h"

enum : u32 { WIDTH = KV_LORA_RANK + QK_ROPE_HEAD_DIM, HALF = QK_ROPE_HEAD_DIM / 2 };

// Rotates channels 2 i and 2 i + 1 of `x` into `y`.
DEV void rope_pair(ACT* y, const ACT* x, u32 i, float cos, float sin) {
    const float a = f32(x[2 * i]), b = f32(x[2 * i + 1]);
    y[2 * i] = to<ACT>(a * cos - b * sin);
    y[2 * i + 1] = to<ACT>(b * cos + a * sin);
}

KERNEL(256)
mla_kv_write(ACT* q, ACT* pool, const ACT* kv, const ACT* norm, const float* cos, const float* sin, const i32* positions,
             const i64* slots, u32 heads, u32 width, u32 q_stride, u32 kv_stride,
             float eps) {
    grid_launch_dependents();
    grid_wait();
    const u64 token = bid_x(), angle_row = (u64)positions[token] * HALF;
    const ACT* own = kv + token * kv_stride;
    float squares = 0.f;
    for (u32 i = tid(); i < KV_LORA_RANK; i += bdim()) squares += f32(own[i]) * f32(own[i]);
    const float scale = inverse_rms(block_sum(squares), KV_LORA_RANK, eps);
    for (u32 i = tid(); i < heads * HALF; i += bdim()) {
        const u32 pair = i % HALF;
        ACT* head = q + token * q_stride + (i / HALF + 1) * width - QK_ROPE_HEAD_DIM;
        rope_pair(head, head, pair, cos[angle_row + pair], sin[angle_row + pair]);
    }
    const i64 slot = slots[token];
    if (slot < 0) return;
    ACT* row = pool + (u64)slot * WIDTH;
    for (u32 i = tid(); i < KV_LORA_RANK; i += bdim()) row[i] = to<ACT>(normed(f32(own[i]), scale, f32(norm[i])));
    for (u32 i = tid(); i < HALF; i += bdim())
        rope_pair(row + KV_LORA_RANK, own + KV_LORA_RANK, i, cos[angle_row + i], sin[angle_row + i]);
}
EXPORT(mla_kv_write)
