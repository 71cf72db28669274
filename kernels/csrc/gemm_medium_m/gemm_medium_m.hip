// gemm_medium_m: y [M, N] = x [M, K] W [N, K]^T for 17 to 128 rows on NVIDIA sm_90a. Its time is nearly bound
// by reading W once. CPU reference: `Linear`, followed by `GatedActivation` (GATED) or `TensorAdd` (RESIDUAL).
//
// Rows of x are the M dimension of the WGMMAs, rows of W their N dimension, so that the number of rows of W
// per tile can be chosen to give every SM the same share. If tiles are narrow, the blocks of a cluster split
// K (split-K), because otherwise loading the rows of x would take longer than loading W. Their sums are
// exchanged through distributed shared memory, and each output is reduced in the block that stores it.
// Weight loads start before the previous kernel has ended (programmatic dependent launch).
//
// Order of additions: k ascending within a block's part of K, then blocks ascending. It depends on K and
// SPLITS only. Rounding: as gemm_small_m.
//
//   -DTILE=16..192   rows of W per block: an N of WGMMA_WIDTH in dev/wgmma.h
//   -DSPLITS=1|2|4   number of consecutive blocks (a cluster) that split a tile's K
//   -DROWS=64|128    rows per block, at least M
//   -DOUT_F32=1      y is float
//   -DGATED=1        y [M, N / 2] = gated(gate, up), where the first half of W's rows gives gate and the
//                    second half up
//   -DRESIDUAL=1     the product is added to y instead of overwriting y
// Grid: SPLITS blocks per tile. Block: 4 warps per 64 rows, and one producer warp. N is even, K a multiple of
// 64. Rows of x and W are aligned to 16 bytes, rows of y to two elements. Boxes of the TMA descriptors: M
// rows of x; TILE rows of W, or half as many with GATED.
// Dynamic shared memory: see `shared_layout` (gemm_medium_m/ring.h), for at least two stages.
//
// Roofline: N K 2 bytes over memory bandwidth. Measured: tests/bench/results/h200/kernels.md.
#include "dev.h"
#include "dev/strip.h"
#ifndef GATED
#  define GATED 0
#endif
#ifndef RESIDUAL
#  define RESIDUAL 0
#endif
#include "gemm_medium_m/multiply.h"

#if OUT_F32
typedef float OUT;
typedef f32x2 Pair;
DEV Pair pair(float a, float b) { return Pair{{a, b}}; }
#else
typedef half_t OUT;
typedef half_x2 Pair;
DEV Pair pair(float a, float b) { return bits_as<Pair>(pack_half(a, b)); }
#endif

// Destination of the sums of a lane. The sums are in groups of four: two adjacent columns in two rows. In the
// functions below, `p` is the index of the group and `half` (0 or 1) selects the row.
struct OutputTileTarget {
    OUT* y;
    u32 m, outputs, stride, first;
};
DEV u32 column_of(const OutputTileTarget& to, u32 p) { return to.first + (cluster_rank<SPLITS>() * RUN + p) * 8 + (lane() & 3) * 2; }
DEV u32 row_of(u32 half) { return warp_id() / 4 * 64 + wgmma_row(half * 2); }
DEV Pair* pair_at(const OutputTileTarget& to, u32 p, u32 half) { return (Pair*)(to.y + (u64)row_of(half) * to.stride + column_of(to, p)); }
template <class Do> DEV void each_pair(const OutputTileTarget& to, const Do& act) {
    UNROLL for (u32 p = 0; p < RUN; ++p)
        UNROLL for (u32 half = 0; half < 2; ++half)
            if (p < run_of(cluster_rank<SPLITS>()) && row_of(half) < to.m && column_of(to, p) < to.outputs) act(p, half);
}

KERNEL_ALONE(CONSUMER_THREADS + WARP_SIZE)
gemm_medium_m(OUT* y, const half_t* x, const half_t* w, const float* bias, u32 m, u32 n, u32 k, u32 y_stride, u32 x_stride,
              TENSOR_MAP x_map, TENSOR_MAP w_map) {
    const SharedMemoryLayout s = shared_layout();
    sync();
    if (SPLITS > 1) cluster_arrive<SPLITS>();
    grid_launch_dependents();
    const BlockWork work = share_of_block(x, w, m, n, k, x_stride);
    if (warp_id() == CONSUMER_THREADS / WARP_SIZE) {
        if (lane() == 0) copy_all(work, s, &w_map, &x_map);
        return;
    }
    grid_wait();
    const OutputTileTarget tile{y, m, GATED ? n / 2 : n, y_stride, work.first_output};
#if RESIDUAL
    Pair before[RUN][2];
    each_pair(tile, [&](u32 p, u32 half) { before[p][half] = *pair_at(tile, p, half); });
#endif
    TileAccumulators sums;
    multiply(sums, work, s);
#if SPLITS > 1
    exchange(sums, s);
#endif
    each_pair(tile, [&](u32 p, u32 half) {
        float v[2];
        UNROLL for (u32 i = 0; i < 2; ++i) {
            const u32 column = column_of(tile, p) + i, at = p * 4 + half * 2 + i;
            v[i] = sums.c[at] + (bias ? bias[column] : 0.f);
#if GATED
            v[i] = gated(v[i], sums.c[RUN * 4 + at] + (bias ? bias[n / 2 + column] : 0.f));
#endif
#if RESIDUAL
            v[i] = f32(before[p][half].v[i]) + f32(to<OUT>(v[i]));
#endif
        }
        *pair_at(tile, p, half) = pair(v[0], v[1]);
    });
}
EXPORT(gemm_medium_m)
