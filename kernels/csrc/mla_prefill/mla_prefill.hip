// mla_prefill: o [tokens, heads * VALUE] = softmax(scale q Kᵀ) V, causal: non-absorbed MLA prefill of long
// rows (long_rows.h), with keys and values computed from compressed KV. A launch processes the keys of one
// window. CPU reference: cpu/mla/non_absorbed_attention.rs.
//
// A row's tokens are cut into tiles; the tokens of a tile share every key that is loaded. Keys are processed
// from position 0 upwards in steps at fixed positions, and the state after a window is carried over unchanged
// to the next one (carry_over.h): a token's result depends only on the keys that it attends to. Tiles with
// the most keys are scheduled first.
//
//   q [tokens, q_stride], beginning at the launch's first head: QK_NOPE_HEAD_DIM + QK_ROPE_HEAD_DIM channels
//   per head; o also begins at the launch's first head
//   kv [keys of the window, kv_stride]: from column 0 on the qk_nope channels of all heads' keys; from column
//   `values` on the values; from column `rope_column` on the QK_ROPE_HEAD_DIM channels that all heads share
//   q_map, kv_map   used with WGMMA: TMA descriptors of q and kv, with boxes of 128 rows
//   carried   f32, carry-over state of tiles with keys in several windows; unused if all are in one window
//   work_counter   counter of work items (tiles) from which blocks draw; zero before and after the launch
//
//   -DWGMMA=1  WGMMA by warpgroups (warpgroups.h), NVIDIA from sm_90 on: tiles of 128 tokens, steps of 128
//               keys.
//               Grid: at most the number of SMs; persistent blocks take tiles until none is left. Block: 384.
//               Dynamic shared memory: GROUPS_SHARED bytes.
//   -DWGMMA=0  MMA by warps (warps.h), every target: tiles of 16 tokens per warp, steps of 16 keys, copied 64
//               at a time.
//               Grid: (tiles of the longest row: tokens / (16 * warps), heads, rows). Block: 256.
//               Dynamic shared memory: STAGES * COPIED * (K_STRIDE + V_STRIDE) elements.
//   -DSTAGES=1|2 pipeline stages in shared memory (with -DWGMMA=0); 1 with warps of 64 lanes, which hold the
//   next run in registers (register_copy.h)
//   -DQK_NOPE_HEAD_DIM=n -DQK_ROPE_HEAD_DIM=n (multiples of 64)  -DVALUE=64|128
//
// Rounding: keys and values when they are computed, probabilities to half_t, the output once.
// Roofline: 2 (QK_NOPE_HEAD_DIM + QK_ROPE_HEAD_DIM + VALUE) operations per token, head and key attended to.
#include "dev.h"
#include "dev/tensor_map.h"
#define HEAD_DIM VALUE
#define QUERY_DIM (QK_NOPE_HEAD_DIM + QK_ROPE_HEAD_DIM)
#include "attention/warp.h"
#include "mla_prefill/long_rows.h"

struct MlaPrefillParams {
    half_t* o;
    float* carried;
    u32* work_counter;
    const half_t *q, *kv;
    const TensorMap *q_map, *kv_map;
    LongRows rows;
    KeyListChunk window;
    u32 tokens, heads, values, rope_column, kv_stride, q_stride, o_stride;  // tokens: of all rows of the step
    float factor;
};

#include "mla_prefill/carry_over.h"
#if WGMMA
#  include "mla_prefill/warpgroups.h"
#  define PREFILL KERNEL_ALONE(384)
#else
#  include "mla_prefill/warps.h"
#  define PREFILL KERNEL(256)
#endif

PREFILL mla_prefill(half_t* o, float* carried, u32* work_counter, const half_t* q, const half_t* kv, TENSOR_MAP q_map,
                    TENSOR_MAP kv_map, const i32* cu_q, const i32* context_lens, u32 first, u32 count, u32 least,
                    u32 begin, u32 keys, u32 tokens, u32 heads, u32 values, u32 rope_column, u32 kv_stride, u32 q_stride,
                    u32 o_stride, float factor) {
    prefill(MlaPrefillParams{o, carried, work_counter, q, kv, &q_map, &kv_map, {cu_q, context_lens, first, count, least},
                             {begin, keys}, tokens, heads, values, rope_column, kv_stride, q_stride, o_stride, factor});
}
EXPORT(mla_prefill)
