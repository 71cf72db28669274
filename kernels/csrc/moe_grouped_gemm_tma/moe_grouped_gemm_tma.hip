// moe_grouped_gemm_tma: one GEMM of an expert MLP on NVIDIA sm_90a: bulk copies stream the weights of experts
// that have tokens, and WGMMA multiplies them. CPU reference: `ExpertMlp`.
//
// A choice is a (token, expert) pair; a position is an index in the list of choices sorted by expert, `order`
// (moe/segment.h). A segment is a range of positions of one expert.
//   -DGATED=1  gate and up: y half_t [positions, I] = gated(gate, up) of x[token of position], W [experts][2
//              I][K]; I is the intermediate size
//   -DGATED=0  down: y [choices, N], f32, or half_t with WIDE_TILE; row `choice` is W x[position of the
//              choice], W [experts][N][K]
//   -DWIDE_TILE=0   segments of at most 64 rows, for batches bound by reading weights
//   -DWIDE_TILE=1   segments of at most TILE_ROWS rows (default 128), and twice as many lines per tile
//   -DFP8=1    W in fp8 with block `scales` (moe/tma_layout.h), converted to half_t in registers; the default
//              of TILE_ROWS is then 64 with WIDE_TILE too
//   -DWEIGHTS_MXFP4=1  W in MXFP4 (moe/tma_mxfp4.h), decoded to half_t in registers; K is a multiple of 32; TILE_ROWS as with FP8
//   -DBIASED=1 adds biases (moe/bias.h)
// prefetched_segments: 0, or (with WIDE_TILE) the number of experts if segment e is the first segment of
// expert e even if empty (moe_align with own = 1): blocks then load the weights of their first tiles before
// routing has finished.
// W: see moe/tma_layout.h. Rows of x are aligned to 16 bytes. Grid: at most one block per SM. Block: THREADS
// threads. Dynamic shared memory: 1024 bytes, and STAGE_BYTES for each of at least 2 stages
// (moe_grouped_gemm_tma/ring.h); more stages are faster.
//
// Warp roles: one producer warp copies weights, two producer warps gather rows of x, and GROUPS consumer
// warpgroups with equal numbers of lines multiply. Sums are over ascending k, so the result of a token
// is bit-identical in any batch. Rounding: gate, up, and their product, each once to half_t; the down
// projection once to the type of y. FP8 adds no rounding: the sum over 128 k is multiplied by its scale in
// f32.
//
// Roofline: N K weights per active expert, or 2 N K operations per choice.
#include "dev.h"
#include "dev/bulk.h"
#include "moe_grouped_gemm_tma/store.h"

#if GATED || WIDE_TILE
typedef half_t OUT;
#else
typedef float OUT;
#endif

KERNEL(THREADS)
moe_grouped_gemm_tma(OUT* y, const half_t* x, const Weight* w, const u32* order, const ExpertSegment* segments, u32 n,
                     u32 k, u32 x_stride, u32 y_stride, u32 top_k, u32 prefetched_segments, const float* scales,
                     u32 unit, u32 scale_stride BIAS_PARAM) {
    const StageRing ring = make_ring();
    sync();
    const u32 begun = GATED ? begin_weights(w, ring, n, k, prefetched_segments) : 0;
    // In the down projection, the producer warp of the weights does not wait for the previous kernel (the
    // gate and up projection), because weights and segments do not depend on it.
    if (GATED || warp_id() != WEIGHT_WARP) grid_wait();
    grid_launch_dependents();
    const u32 all = load_segment(segments).all;
    BlockWorkCursor share = share_of_block(w, segments, all, GATED ? order : nullptr, n, k, top_k);
    share.begun = begun * COLUMNS;
#if FP8
    share.scaling = ExpertScales{scales, unit, scale_stride};
#endif
    if (warp_id() == WEIGHT_WARP) return copy_weights(share, ring, begun);
    if (warp_id() > WEIGHT_WARP) return copy_rows(share, ring, x, x_stride);
    const ExpertBiases biases{BIAS_ARG, n};
    PipelineState pipe{0, 0};
    PassAccumulators sums;
    while (next_pass(share)) {
        multiply(sums, ring, pipe, columns_of(share), share.rows, share.strips);
#if GATED
        store_gated(y, sums.c[0], share, biases, strip_of_sums(0), y_stride);
        if constexpr (GROUP_LINES > 64) store_gated(y, sums.c[GROUP_LINES / 128], share, biases, strip_of_sums(1), y_stride);
#else
        store_choices(y, sums.c[0], share, biases, order, strip_of_sums(0), y_stride);
        if constexpr (GROUP_LINES > 64) store_choices(y, sums.c[GROUP_LINES / 128], share, biases, order, strip_of_sums(1), y_stride);
#endif
    }
}
EXPORT(moe_grouped_gemm_tma)
