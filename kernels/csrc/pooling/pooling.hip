// pooling.hip - sums of hidden states by sequence slot, for mean pooling. CPU reference: cpu/pooling.rs.
//
// pool_sum_rows  sums[slot of r] = (continues[r] ? sums[slot of r] : 0) + x[first of r] + ... + x[last of r]
//                sums f32 [slots, cols], x [tokens, cols] of ACT, cu_q i32 [rows + 1], seq_slots and continues
//                i32 [rows]; every row has another slot.
// Grid: rows x ceil(cols / bdim()). Block: up to 256 threads, one channel each.
// Rounding: each sum is one chain of f32 additions in token order. Roofline: bytes of x over memory bandwidth;
// a single long row is bound by the latency of its chain.
#include "dev.h"

KERNEL(256)
pool_sum_rows(float* sums, const ACT* x, const i32* cu_q, const i32* seq_slots, const i32* continues, u32 cols,
              u32 sum_stride, u32 x_stride, u32 slots, u32 tokens) {
    grid_wait();
    grid_launch_dependents();
    const u32 row = bid_x(), col = bid_y() * bdim() + tid();
    const u32 slot = (u32)seq_slots[row], end = (u32)cu_q[row + 1];
    if (col >= cols || slot >= slots || end > tokens) return;
    float* sum = sums + (u64)slot * sum_stride + col;
    float value = continues[row] ? *sum : 0.f;
    for (u32 t = (u32)cu_q[row]; t < end; ++t) value += f32(x[(u64)t * x_stride + col]);
    *sum = value;
}
EXPORT(pool_sum_rows)
