// mla_prefill: o [T, heads VALUE] = softmax(scale q Kᵀ) V, causal, for rows of many tokens (long_rows.h), whose keys and values have
// been made of latents: the part of it that the keys of one window have. CPU twin: cpu/mla/non_absorbed_attention.rs.
//
// A row's tokens are cut into tiles, whose tokens share every key that is loaded. Keys are visited from position 0 upwards in steps that
// begin at fixed positions, and what a window leaves is carried to the next one as it is (carry_over.h): a token's result depends on the
// keys it sees and on nothing else. Tiles with the most keys come first.
//
//   q [T, q_stride], from the launch's first head on: UNTURNED + ROTARY channels each; o likewise
//   kv [keys of the window, kv_stride]: unturned channels of all heads' keys, from column `values` on their values, and from column
//      `turned` on the ROTARY channels that are the same in all heads
//   q_map, kv_map   with GROUPS: q and kv as matrices, in boxes of 128 rows
//   carried   f32, what tiles leave whose keys are in several windows; not looked at where all are in one
//   taken     one counter that is zero, and is left so
//
//   -DGROUPS=1  warpgroups (warpgroups.h), NVIDIA from sm_90 on: tiles of 128 tokens, steps of 128 keys.
//               Grid: at most multiprocessors; each block takes tiles until none is left. Block: 384.
//               Dynamic shared memory: GROUPS_SHARED bytes.
//   -DGROUPS=0  warps (warps.h), everywhere: tiles of 16 tokens a warp, steps of 16 keys, copied 64 at a time.
//               Grid: (tiles of the longest row: tokens / (16 * warps), heads, rows). Block: 256.
//               Dynamic shared memory: STAGES * COPIED * (K_STRIDE + V_STRIDE) elements.
//   -DSTAGES=1|2 (warps) copies in shared memory; AMD copies through registers and has nothing to overlap
//   -DUNTURNED=n -DROTARY=n (multiples of 64)  -DVALUE=64|128
//
// Rounding: keys and values when they were made, probabilities to half_t, the output once.
// Roofline: 2 (UNTURNED + ROTARY + VALUE) operations a token, head and key it sees.
#include "dev.h"
#include "dev/tensor_map.h"
#define HEAD_DIM VALUE
#define QUERY_DIM (UNTURNED + ROTARY)
#include "attention/warp.h"
#include "mla_prefill/long_rows.h"

struct Job {
    half_t* o;
    float* carried;
    u32* taken;
    const half_t *q, *kv;
    const TensorMap *q_map, *kv_map;
    LongRows rows;
    Window window;
    u32 tokens, heads, values, turned, kv_stride, q_stride, o_stride;  // tokens: of all rows of the step
    float factor;
};

#include "mla_prefill/carry_over.h"
#if GROUPS
#  include "mla_prefill/warpgroups.h"
#  define PREFILL KERNEL_ALONE(384)
#else
#  include "mla_prefill/warps.h"
#  define PREFILL KERNEL(256)
#endif

PREFILL mla_prefill(half_t* o, float* carried, u32* taken, const half_t* q, const half_t* kv, TENSOR_MAP q_map,
                    TENSOR_MAP kv_map, const i32* cu_q, const i32* context_lens, u32 first, u32 count, u32 least,
                    u32 begin, u32 keys, u32 tokens, u32 heads, u32 values, u32 turned, u32 kv_stride, u32 q_stride,
                    u32 o_stride, float factor) {
    prefill(Job{o, carried, taken, q, kv, &q_map, &kv_map, {cu_q, context_lens, first, count, least}, {begin, keys}, tokens,
                heads, values, turned, kv_stride, q_stride, o_stride, factor});
}
EXPORT(mla_prefill)
