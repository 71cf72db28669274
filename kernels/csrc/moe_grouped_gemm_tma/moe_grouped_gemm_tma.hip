// moe_grouped_gemm_tma: one product of an expert MLP on NVIDIA sm_90a: the copy engine streams the weights of experts that
// have tokens, wgmma multiplies. CPU twin: `ExpertMlp`.
//
//   -DGATED=1  y half_t [positions, I] = silu(gate) * up of x[token of position], W [E][2 I][K]
//   -DGATED=0  y [choices, N] = x[position], written by choice, W [E][N][K]; f32, half_t with MANY
//   -DMANY=0   segments of at most 64 rows: weights are all the time there is
//   -DMANY=1   at most TILE_ROWS, against twice as many lines; 128 unless it says otherwise
//   -DFP8=1    W in fp8 with `scales` of blocks (moe/tma_layout.h); it becomes half_t in registers. TILE_ROWS is 64 with MANY then
// early: 0, or so many segments are the first ones of these experts, if only without rows (moe_align): blocks then begin
// with the weights of their first tiles before anybody has chosen. MANY only.
// W as moe/tma_layout.h says. Rows of x on 16 bytes. Grid: at most a block a multiprocessor. Block: 11 warps.
// Dynamic shared memory: 1024 bytes and at least 2 stages (moe_grouped_gemm_tma/ring.h); the more, the better.
//
// Roles: one warp copies weights; two gather rows of x; eight multiply, in two groups with half of the lines each.
// Order of a sum: ascending in k, whatever else: a token has the same sums in any company.
// Rounding: gate, up, and their product, each once to half_t; the second product once to the type of y. FP8: nothing else, the
// sum over 128 k takes its scale in f32.
//
// Roofline: N K weights for each expert that was chosen, or 2 N K operations a choice.
#include "dev.h"
#include "dev/bulk.h"
#include "moe_grouped_gemm_tma/store.h"

#if GATED || MANY
typedef half_t OUT;
#else
typedef float OUT;
#endif

KERNEL(THREADS)
moe_grouped_gemm_tma(OUT* y, const half_t* x, const Weight* w, const u32* order, const Segment* segments, u32 n, u32 k, u32 x_stride,
                     u32 y_stride, u32 top_k, u32 early, const float* scales, u32 unit, u32 scale_stride) {
    const Ring ring = make_ring();
    sync();
    const u32 begun = GATED ? begin_weights(w, ring, n, k, early) : 0;
    // Segments and weights of the second product do not depend on the first.
    if (GATED || warp_id() != WEIGHT_WARP) grid_wait();
    grid_release();
    const u32 all = load_segment(segments).all;
    Share share = share_of_block(w, segments, all, GATED ? order : nullptr, n, k, top_k);
    share.begun = begun * COLUMNS;
#if FP8
    share.scaling = Scaling{scales, unit, scale_stride};
#endif
    if (warp_id() == WEIGHT_WARP) return copy_weights(share, ring, begun);
    if (warp_id() > WEIGHT_WARP) return copy_rows(share, ring, x, x_stride);
    RingStage turn{0, 0};
    Sums sums;
    while (next_pass(share)) {
        multiply(sums, ring, turn, columns_of(share));
#if GATED
        store_gated(y, sums.c[0], share, strip_of_sums(0), y_stride);
        if constexpr (GROUP_LINES > 64) store_gated(y, sums.c[GROUP_LINES / 128], share, strip_of_sums(1), y_stride);
#else
        store_choices(y, sums.c[0], share, order, strip_of_sums(0), y_stride);
        if constexpr (GROUP_LINES > 64) store_choices(y, sums.c[GROUP_LINES / 128], share, order, strip_of_sums(1), y_stride);
#endif
    }
}
EXPORT(moe_grouped_gemm_tma)
