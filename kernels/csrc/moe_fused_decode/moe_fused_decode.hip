// moe_fused_decode: one GEMM of an expert MLP for up to 64 choices ((token, expert) pairs), where launch
// overhead dominates. Each block sorts the choices by expert itself, and the down projection also sums the
// weighted expert outputs of each token. It uses the roles and the weight layout of moe_grouped_gemm_tma. CPU
// reference: `ExpertMlp`.
//
//   -DGATED=1  y half_t [places, I] = gated(gate, up) of x[token of place], W [experts][2 I][K]
//   -DGATED=0  y half_t [tokens, N] = sum of weight * W x[place] over the places of a token, W
//              [experts][N][K], x [places, K]
//   -DROUTES=1 routing is fused: choices are the top_k - shared largest of softmax(logits), logits f32
//   [tokens, all], all <= 256, followed by the shared experts (moe_route). Block 0 of the gate and up
//   projection increments `counts`, see moe_route also for `slots`
//   -DFP8=1    W in fp8 with `scales`, as in moe_grouped_gemm_tma; -DWEIGHTS_MXFP4=1, -DBIASED=1: likewise
//   -DWIDE_TILE=1   twice as many lines per tile. -DTILE_ROWS=n  rows of x per tile, at least the number of
//              tokens, or of choices in the down projection, with EQUAL_SHARES of choices of one expert
//   -DEQUAL_SHARES=1  with GATED=0: strips of all experts are divided equally among blocks, which leave expert outputs in
//              `expert_outputs` f32 [places, N], and count in `finished` u32 [N / 16] (zero) how many experts of a strip
//              have finished
//   -DK_PARTS=n  n parts of K, each multiplied by different warpgroups, with MXFP4 weights and at most 8 rows of x. Adds
//              the parts in f32, so that the order of additions differs
//   -DROUTES=0 choices are inputs: experts i32 and weights f32, [tokens * top_k]
// A place is an index in the list of the choices of this rank, sorted by ascending expert. Grid, block,
// shared memory, order of additions (except with K_PARTS) and rounding: as moe_grouped_gemm_tma; the weighted sum is in f32, over
// ascending experts, rounded once.
//
// Roofline: N K weights per active expert over memory bandwidth.
#include "dev.h"
#include "dev/bulk.h"
#include "moe_fused_decode/route.h"
#if GATED
#  include "moe_fused_decode/gate_up.h"
#elif EQUAL_SHARES
#  include "moe_fused_decode/down_shares.h"
#  define SHARES_PARAM , float* expert_outputs, u32* finished
#else
#  include "moe_fused_decode/down_combine.h"
#endif

#ifndef SHARES_PARAM
#  define SHARES_PARAM
#endif

KERNEL(THREADS)
moe_fused_decode(half_t* y, const half_t* x, const Weight* w, const i32* experts, const float* weights, const float* logits,
                 u32 logits_stride, u32 all, u32 normalise, u32 shared, u32 choices, u32 first, u32 count, u32 n, u32 k, u32 x_stride,
                 u32 y_stride, u32 top_k, const float* scales, u32 unit, u32 scale_stride, u32* counts, const i64* slots SHARES_PARAM BIAS_PARAM) {
    SHARED(ExpertSortedTokens, sorted, 1);
    const StageRing ring = make_ring();
    // Of the inputs of the down projection, only x is an output of the previous kernel. Therefore the down
    // projection sorts the choices and starts loading weights before grid_wait().
    if (GATED) {
        grid_wait();
        grid_launch_dependents();
    }
    u32* counting = GATED && bid_x() == 0 ? counts : nullptr;
    const RoutingInputs router{experts, weights, logits, logits_stride, all, normalise, shared, counting, slots};
    route_tokens(*sorted, router, choices, first, count, top_k);
    if (!GATED) grid_launch_dependents();
#if GATED
    GateUpWork work = gate_up_work_of_block(w, *sorted, choices / top_k, n, k);
#elif EQUAL_SHARES
    DownWork work = strips_of_block(w, *sorted, n, k);
#else
    DownCombineWork work = down_work_of_block(w, *sorted, n, k);
#endif
#if FP8
    work.scaling = ExpertScales{scales, unit, scale_stride};
#endif
    if (warp_id() == WEIGHT_WARP) return copy_weights(work, ring);
    if (!GATED) grid_wait();
    if (warp_id() > WEIGHT_WARP) return copy_rows(work, ring, x, x_stride);
    const ExpertBiases biases{BIAS_ARG, n};
    PipelineState pipe{0, 0};
    PassAccumulators sums;
#if GATED
    while (next_pass(work)) {
        multiply(sums, ring, pipe, k, work.rows, work.strips);
        if (k_part() == 0)
            UNROLL for (u32 t = 0; t < GROUP_LINES / 64; ++t) store_gate_up(y, sums.c[t], work, biases, strip_of_sums(t), y_stride);
    }
#elif EQUAL_SHARES
    const StoredOutputs to{expert_outputs, finished};
    const u32 tokens = choices / top_k;
    if (sorted->all == 0) store_zeros(y, tokens, n, y_stride);
    while (next_pass(work)) {
        multiply(sums, ring, pipe, k, work.rows, work.strips);
        if (k_part() == 0) store_down(y, to, sums.c[0], work, biases, strip_of_sums(0), tokens, top_k, y_stride);
    }
#else
    SHARED(ExpertOutputs, expert_outputs, 1);
    while (next_pass(work)) {
        multiply(sums, ring, pipe, k, work.rows, work.strips);
        UNROLL for (u32 t = 0; t < GROUP_LINES / 64; ++t) accumulate_output(*expert_outputs, sums.c[t], work, biases, strip_of_sums(t));
        if (!is_last_of_strip(work)) continue;
        named_barrier_sync<1>(CONSUMER_THREADS);
        store_combined(y, *expert_outputs, work, choices / top_k, y_stride);
        named_barrier_sync<1>(CONSUMER_THREADS);
    }
#endif
}
EXPORT(moe_fused_decode)
