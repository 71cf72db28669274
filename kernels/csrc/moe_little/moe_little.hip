// moe_little: one product of an expert MLP for up to 64 choices, where every launch counts: each block sorts the choices for
// itself, and the second product ends in the weighted sum. Else as moe_stream, whose words these are. CPU twin: `moe_mlp`.
//
//   -DGATED=1  y half_t [places, I] = silu(gate) * up of x[token of place], W [E][2 I][K]
//   -DGATED=0  y half_t [T, N] = sum of weight * W x[place] over the places of a token, W [E][N][K], x [places, K]
//   -DROUTES=1 choices are the top_k - shared largest of softmax(logits), logits f32 [T, all], all <= 256, and the shared
//              experts behind all; see moe_route, also for counts and slots: the first block of the first product counts
//   -DFP8=1    W in fp8 with `scales`, as in moe_stream
//   -DMANY=1   twice as many lines, -DTILE_ROWS=n rows of x at a time: no fewer than tokens, and choices in the second product
//   -DROUTES=0 they are experts i32, weights f32 [T top_k]
// Places: choices of this rank by ascending expert.
// Grid, block, shared memory, order and rounding as moe_stream; the weighted sum in f32, experts ascending, rounded once.
//
// Roofline: N K weights for each expert that was chosen.
#include "dev.h"
#include "dev/bulk.h"
#include "moe_little/choose.h"
#if GATED
#  include "moe_little/mix.h"
#else
#  include "moe_little/blend.h"
#endif

KERNEL(THREADS)
moe_little(half_t* y, const half_t* x, const Weight* w, const i32* experts, const float* weights, const float* logits,
           u32 logits_stride, u32 all, u32 normalise, u32 shared, u32 choices, u32 first, u32 count, u32 n, u32 k, u32 x_stride,
           u32 y_stride, u32 top_k, const float* scales, u32 unit, u32 scale_stride, u32* counts, const i64* slots) {
    SHARED(Sorted, sorted, 1);
    const Ring ring = make_ring();
    // The second product reads of its predecessor nothing but x: it sorts, and begins with the weights, before.
    if (GATED) {
        grid_wait();
        grid_release();
    }
    u32* counting = GATED && bid_x() == 0 ? counts : nullptr;
    const Router router{experts, weights, logits, logits_stride, all, normalise, shared, counting, slots};
    choose(*sorted, router, choices, first, count, top_k);
    if (!GATED) grid_release();
#if GATED
    Mix work = mix_of_block(w, *sorted, choices / top_k, n, k);
#else
    Blend work = blend_of_block(w, *sorted, n, k);
#endif
#if FP8
    work.scaling = Scaling{scales, unit, scale_stride};
#endif
    if (wave() == WEIGHT_WAVE) return copy_weights(work, ring);
    if (!GATED) grid_wait();
    if (wave() > WEIGHT_WAVE) return copy_rows(work, ring, x, x_stride);
    Turn turn{0, 0};
    Sums sums;
#if GATED
    while (next_pass(work)) {
        multiply(sums, ring, turn, k);
        UNROLL for (u32 t = 0; t < GROUP_LINES / 64; ++t) put_mix(y, sums.c[t], work, strip_of_sums(t), y_stride);
    }
#else
    SHARED(Said, said, 1);
    while (next_pass(work)) {
        multiply(sums, ring, turn, k);
        UNROLL for (u32 t = 0; t < GROUP_LINES / 64; ++t) keep_said(*said, sums.c[t], work, strip_of_sums(t));
        if (!is_last_of_strip(work)) continue;
        some_sync<1>(MULTIPLIERS);
        put_blend(y, *said, work, choices / top_k, y_stride);
        some_sync<1>(MULTIPLIERS);
    }
#endif
}
EXPORT(moe_little)
