// moe_plain: one GEMM of an expert MLP for every type and shape, one warp per choice ((token, expert) pair)
// and output. Reference kernel, not optimised; used for f32 models and for sizes that do not allow 16-byte
// loads. CPU reference: `ExpertMlp`.
//
//   -DACT_F32=0|1  type of x, W, and y of the gate and up projection
//   -DGATED=1  y [choices, I] = activation of gate and up (dev/gate.h) of x[token], W [experts][2 I][K], gate and
//              up each rounded first
//   -DGATED=0  y f32 [choices, N] = W x[choice], W [experts][N][K]
// `bias` f32 [experts][outputs of W], added to the product, or null.
// Choices of experts outside [first, first + count) are not written. Grid: (choices, outputs / warps). Block:
// 256.
// Order of additions: per lane, then as in warp_sum.
#include "dev.h"
#include "dev/gate.h"

DEV float dot(const ACT* x, const ACT* w, u32 k) {
    float sum = 0.f;
    for (u32 i = lane(); i < k; i += WARP_SIZE) sum = fma_(f32(x[i]), f32(w[i]), sum);
    return warp_sum(sum);
}

KERNEL(256) moe_plain(void* y, const ACT* x, const ACT* w, const i32* experts, u32 n, u32 k, u32 x_stride, u32 top_k,
                      u32 first, u32 count, const float* bias) {
    grid_wait();
    const u32 choice = bid_x(), expert = (u32)experts[choice] - first, outputs = GATED ? n / 2 : n;
    const u32 out = bid_y() * (bdim() / WARP_SIZE) + warp_id();
    if (expert >= count || out >= outputs) return;
    const ACT* row = x + (u64)(GATED ? choice / top_k : choice) * x_stride;
    const ACT* weights = w + ((u64)expert * n + out) * k;
    if (bias) bias += (u64)expert * n + out;
    const float sum = dot(row, weights, k) + (bias ? bias[0] : 0.f);
    const u64 at = (u64)choice * outputs + out;
#if GATED
    const float up_sum = dot(row, weights + (u64)outputs * k, k) + (bias ? bias[outputs] : 0.f);
    const float gate = f32(to<ACT>(sum)), up = f32(to<ACT>(up_sum));
#  if GATE
    if (lane() == 0) ((ACT*)y)[at] = to<ACT>(activated(gate) * up_factor(up));
#  else
    if (lane() == 0) ((ACT*)y)[at] = to<ACT>(gate / (1.f + exp2_(-1.44269504f * gate)) * up);
#  endif
#else
    if (lane() == 0) ((float*)y)[at] = sum;
#endif
}
EXPORT(moe_plain)
