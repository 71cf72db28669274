// gemm_medium_m/multiply.h - the consumer warps, and the reduction of the sums of a cluster's blocks.
#pragma once
#include "gemm_medium_m/ring.h"

// Accumulators of a lane: element i is row wgmma_row(i) and column wgmma_col(i) of the tile of this
// warpgroup.
struct TileAccumulators { float c[SUMS]; };

DEV void multiply(TileAccumulators& sums, const BlockWork& work, const SharedMemoryLayout& s) {
    PipelineState pipe{0, 0};
    UNROLL for (u32 i = 0; i < SUMS; ++i) sums.c[i] = 0.f;
    wgmma_fence_operand(sums.c);  // Zeroes sums here, not between WGMMAs, which would serialise them.
    const auto release = [&](u32 stage) {
        warp_sync();
        if (lane() == 0) barrier_arrive(s.empty + stage);
    };
    u32 before = 0;
#pragma unroll 1
    for (u32 block = work.begin; block < work.end; ++block) {
        barrier_wait(s.full + pipe.stage, pipe.phase);
        const u8* stage = s.ring + pipe.stage * STAGE_BYTES;
        const KMajorOperand x = by_k(stage + W_BYTES + warp_id() / 4 * 64 * PANEL_LINE), w = by_k(stage);
        wgmma_fence();
        UNROLL for (u32 i = 0; i < COLUMNS / 16; ++i)
            wgmma<TILE>(sums.c, advanced(x, i * 32), advanced(w, i * 32), true);
        wgmma_commit();
        if (block > work.begin) {
            wgmma_wait<1>();
            release(before);
        }
        before = pipe.stage;
        next(pipe, s);
    }
    wgmma_wait<0>();
    wgmma_fence_operand(sums.c);
    release(before);
}

// Returns the index of the first accumulator of group p among the accumulators that block `rank` of the
// cluster stores. A group has four accumulators: two adjacent columns of row wgmma_row(0), then the same
// columns of row wgmma_row(0) + 8.
DEV constexpr u32 first_sum(u32 rank, u32 p) { return p / RUN * (SUMS / 2) + (rank * RUN + p % RUN) * 4; }

#if SPLITS > 1
// Split-K reduction in a cluster: each block receives the partial sums of all blocks for the columns that it
// stores, and adds them in ascending order of blocks.
DEV void exchange(TileAccumulators& sums, const SharedMemoryLayout& s) {
    f32x4* places = (f32x4*)s.sums + tid();
    cluster_wait<SPLITS>();
    UNROLL for (u32 to = 0; to < SPLITS; ++to)
        UNROLL for (u32 p = 0; p < PIECES; ++p) {
            if (p % RUN >= run_of(to)) continue;
            const float* c = sums.c + first_sum(to, p);
            peer_store<SPLITS>(places + (cluster_rank<SPLITS>() * PIECES + p) * CONSUMER_THREADS, to,
                               f32x4{{c[0], c[1], c[2], c[3]}}, s.summed);
        }
    barrier_wait_peers(s.summed, 0);
    UNROLL for (u32 p = 0; p < PIECES; ++p) {
        if (p % RUN >= run_of(cluster_rank<SPLITS>())) continue;
        f32x4 sum = places[p * CONSUMER_THREADS];
        UNROLL for (u32 from = 1; from < SPLITS; ++from) {
            const f32x4 v = places[(from * PIECES + p) * CONSUMER_THREADS];
            UNROLL for (u32 e = 0; e < 4; ++e) sum.v[e] += v.v[e];
        }
        UNROLL for (u32 e = 0; e < 4; ++e) sums.c[p * 4 + e] = sum.v[e];
    }
}
#endif
