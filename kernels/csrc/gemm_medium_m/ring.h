// gemm_medium_m/ring.h - sizes of a block, its ring of pipeline stages, and the producer warp.
#pragma once
#include "dev/cluster.h"
#include "dev/tensor_map.h"
#include "dev/wgmma.h"

enum : u32 {
    GROUPS = ROWS / 64,           // consumer warpgroups, 64 rows of x each
    CONSUMER_THREADS = GROUPS * 4 * WARP_SIZE,
    COLUMNS = 64,                 // k per stage, which fill one row of a panel
    PANEL_LINE = COLUMNS * 2,     // row of a panel in bytes
    W_BYTES = TILE * PANEL_LINE,
    STAGE_BYTES = W_BYTES + ROWS * PANEL_LINE,
    SUMS = TILE / 2,              // accumulators per thread
    HALVES = GATED ? 2 : 1,       // rows of W per output: gate and up
    OUTPUTS = TILE / HALVES,
    EIGHTS = OUTPUTS / 8,         // groups of 8 outputs; each block of a cluster stores RUN of them
    RUN = (EIGHTS + SPLITS - 1) / SPLITS,
    PIECES = RUN * HALVES,        // pieces of four sums per thread that a block stores
    SUM_BYTES = SPLITS > 1 ? SPLITS * PIECES * CONSUMER_THREADS * 16 : 0,
    MOST_STAGES = 16,
    BARRIER_BYTES = (2 * MOST_STAGES + 1) * 8 + 8
};

// Returns how many groups of 8 outputs of a tile block `rank` of the cluster stores.
DEV constexpr u32 run_of(u32 rank) {
    return (rank + 1) * RUN <= EIGHTS ? (u32)RUN : rank * RUN < EIGHTS ? EIGHTS - rank * RUN : 0;
}

// Work of a block: the tile of outputs from first_output on, and the part of K that the block sums, columns
// [begin * COLUMNS, end * COLUMNS).
struct BlockWork {
    const half_t *x, *w;
    u32 m, n, k, x_stride;
    u32 first_output, begin, end;
};
DEV BlockWork share_of_block(const half_t* x, const half_t* w, u32 m, u32 n, u32 k, u32 x_stride) {
    const u32 rank = cluster_rank<SPLITS>(), all = k / COLUMNS;
    const u32 tile = bid_x() / SPLITS;
    return BlockWork{x, w, m, n, k, x_stride, tile * OUTPUTS, all * rank / SPLITS, all * (rank + 1) / SPLITS};
}

// Addresses in the launch's dynamic shared memory.
struct SharedMemoryLayout {
    Barrier *full, *empty, *summed;
    u8 *sums, *ring;  // ring aligned to 1024 bytes
    u32 stages;
};
// Index of the current stage, and the parity of its phase for barrier_wait().
struct PipelineState { u32 stage, phase; };
DEV void next(PipelineState& t, const SharedMemoryLayout& s) {
    if (++t.stage < s.stages) return;
    t.stage = 0;
    t.phase ^= 1;
}

DEV SharedMemoryLayout shared_layout() {
    DYN_SHARED(u8, shared);
    Barrier* full = (Barrier*)shared;
    u8* sums = shared + BARRIER_BYTES;
    SharedMemoryLayout s{full, full + MOST_STAGES, full + 2 * MOST_STAGES, sums, align_1024(sums + SUM_BYTES), 0};
    const u32 fit = (dynamic_shared_bytes() - (u32)(s.ring - shared)) / STAGE_BYTES;
    s.stages = fit < MOST_STAGES ? fit : (u32)MOST_STAGES;
    if (tid() == 0) {
#pragma unroll 1
        for (u32 i = 0; i < s.stages; ++i) {
            barrier_init(s.full + i, 1);
            barrier_init(s.empty + i, GROUPS * 4);
        }
        barrier_init(s.summed, 1);
        barriers_ready();
        if (SPLITS > 1) barrier_expect(s.summed, SPLITS * HALVES * run_of(cluster_rank<SPLITS>()) * CONSUMER_THREADS * 16);
    }
    return s;
}

DEV void copy_weights(const BlockWork& work, const SharedMemoryLayout& s, const TensorMap* map, u32 stage, u32 block,
                      u64 policy) {
    u8* to = s.ring + stage * STAGE_BYTES;
    barrier_expect(s.full + stage, W_BYTES + work.m * PANEL_LINE);
    const HalfMatrixView w{work.w, work.n, work.k};
    UNROLL for (u32 half = 0; half < HALVES; ++half)
        panel_copy_once(to + half * OUTPUTS * PANEL_LINE, map, w, OUTPUTS, half * work.n / 2 + work.first_output,
                        block * COLUMNS, s.full + stage, policy);
}
// Loads the rows of x of a pipeline stage. Rows from M on are not loaded: their values affect only the
// outputs of these rows, which are not stored.
DEV void copy_rows(const BlockWork& work, const SharedMemoryLayout& s, const TensorMap* map, u32 stage, u32 block) {
    const HalfMatrixView x{work.x, work.m, work.x_stride};
    panel_copy(s.ring + stage * STAGE_BYTES + W_BYTES, map, x, work.m, 0, block * COLUMNS, s.full + stage);
}

// Loop of the producer thread. Before grid_wait() it loads the weights of as many stages as the ring has,
// then the rows of x of these stages, then the remaining stages.
DEV void copy_all(const BlockWork& work, const SharedMemoryLayout& s, const TensorMap* w_map, const TensorMap* x_map) {
    const u64 policy = read_once();
    const u32 all = work.end - work.begin, ahead = all < s.stages ? all : s.stages;
#pragma unroll 1
    for (u32 i = 0; i < ahead; ++i) copy_weights(work, s, w_map, i, work.begin + i, policy);
    grid_wait();
#pragma unroll 1
    for (u32 i = 0; i < ahead; ++i) copy_rows(work, s, x_map, i, work.begin + i);
    PipelineState pipe{0, 0};
#pragma unroll 1
    for (u32 block = work.begin + ahead; block < work.end; ++block, next(pipe, s)) {
        barrier_wait(s.empty + pipe.stage, pipe.phase);
        copy_weights(work, s, w_map, pipe.stage, block, policy);
        copy_rows(work, s, x_map, pipe.stage, block);
    }
}
