// gemm_large_m/roles.h - warp roles of a block: one producer warp loads, and eight consumer warps multiply
// and store. All warps process the same tiles in the same order. Through the ring buffer, the warps of both
// blocks of a cluster are at most STAGES steps (64 columns of K each) apart.
#pragma once
#include "gemm_large_m/ring.h"

// Loop of the producer thread. It returns only after all arrivals at the barriers of this block: the other
// block of the cluster also arrives at them, so the block must not exit earlier.
DEV void fetch(const StageRing& ring, const TmaGemmProblem& p, const GemmTensorMaps& maps) {
    const u32 half = cluster_rank<CLUSTER>(), line_stride = GATED ? p.outputs : (u32)HALF_LINES;
    PipelineState pipe{0, 0};
    each_tile(p, [&](const TileOrigin& tile) {
#pragma unroll 1
        for (u32 at = 0; at < p.k; at += COLUMNS, advance(pipe)) {
            u8* stage = ring.stages + pipe.stage * STAGE_BYTES;
            Barrier* full = ring.full + pipe.stage;
            barrier_wait(ring.empty + pipe.stage, pipe.phase ^ 1);
            barrier_expect(full, STAGE_BYTES);
            panel_copy(stage, maps.x, p.x, TILE_ROWS, tile.row, at, full);
            panel_copy_all<CLUSTER, HALF_LINES>(stage + X_BYTES + half * HALF_BYTES, maps.w, p.w,
                                                tile.output + half * line_stride, at, full);
        }
    });
#pragma unroll 1
    for (u32 i = 0; i < STAGES; ++i, advance(pipe)) barrier_wait(ring.empty + pipe.stage, pipe.phase ^ 1);
}

// Signals that this warp has read a stage: arrives at barrier b in every block of the cluster, because every
// block multicasts into this stage.
DEV void release(Barrier* b) {
    if (lane() < CLUSTER) barrier_arrive_at<CLUSTER>(b, lane());
}

// Accumulators of a lane: element i is the product of row wgmma_row(i) of the 64 rows of x of this warpgroup
// with row wgmma_col(i) of W in the tile.
struct TileAccumulators { float c[HALF_LINES]; };

DEV void multiply(TileAccumulators& sums, const StageRing& ring, PipelineState& pipe, u32 group, u32 k) {
    u32 before = 0;
#pragma unroll 1
    for (u32 at = 0; at < k; at += COLUMNS, advance(pipe)) {
        const u8* stage = ring.stages + pipe.stage * STAGE_BYTES;
        const KMajorOperand x = by_k(stage + group * 64 * LINE_BYTES), w = by_k(stage + X_BYTES);
        barrier_wait(ring.full + pipe.stage, pipe.phase);
        wgmma_fence();
        UNROLL for (u32 i = 0; i < COLUMNS / 16; ++i)
            wgmma<2 * HALF_LINES>(sums.c, advanced(x, i * 32), advanced(w, i * 32), at != 0 || i != 0);
        wgmma_commit();
        if (at != 0) {
            wgmma_wait<1>();
            release(ring.empty + before);
        }
        before = pipe.stage;
    }
    wgmma_wait<0>();
    wgmma_fence_operand(sums.c);
    release(ring.empty + before);
}

// Returns the activation of gate and up (dev/gate.h) of two adjacent outputs as a packed pair of half_t. Gate and up are rounded in
// pairs, which is eight times as fast as rounding single values.
DEV u32 gated_pair(float gate, float next_gate, float up, float next_up) {
    const u32 gates = pack_half(gate, next_gate), ups = pack_half(up, next_up);
    const auto product = [](float g, float u) { return activated(g) * up_factor(u); };
    return pack_half(product(low_half(gates), low_half(ups)), product(high_half(gates), high_half(ups)));
}

// Returns the outputs of accumulators i and i + 1 as a packed pair of half_t.
DEV u32 result(const TileAccumulators& sums, u32 i) {
    const float(&c)[HALF_LINES] = sums.c;
#if GATED
    return gated_pair(c[i], c[i + 1], c[i + 64], c[i + 65]);
#else
    return pack_half(c[i], c[i + 1]);
#endif
}

// Stores the 16 output rows of this warp, from `row` on: writes them to the boxes (16 rows by 64 columns) of
// this warp in shared memory, from which TMA stores them to y.
DEV void put(u8* boxes, const TmaGemmProblem& p, const GemmTensorMaps& maps, u32 row, u32 output,
             const TileAccumulators& sums) {
    UNROLL for (u32 column = 0; column < TILE_OUTPUTS; column += 64) {
        u8* box = boxes + column / 64 % BOXES * BOX_BYTES;
        if (lane() == 0) boxes_wait<BOXES - 1>();
        warp_sync();
        UNROLL for (u32 i = 0; i < 32; i += 2) {
            const u32 at = wgmma_col(i);
            *(u32*)(box + panel_offset(wgmma_row(i) % 16, at / 8) + at % 8 * 2) = result(sums, column / 2 + i);
        }
        fence_async_shared();
        warp_sync();
        if (lane() == 0) {
            box_store(maps.y, p.y, p.outputs, row, output + column, box);
            boxes_commit();
        }
    }
}

DEV void consume_tiles(const StageRing& ring, const TmaGemmProblem& p, const GemmTensorMaps& maps) {
    const u32 warp_here = warp_id() - PRODUCER_WARPS, group = warp_here / 4;
    u8* boxes = ring.boxes + warp_here * BOXES * BOX_BYTES;
    PipelineState pipe{0, 0};
    each_tile(p, [&](const TileOrigin& tile) {
        TileAccumulators sums;
        multiply(sums, ring, pipe, group, p.k);
        put(boxes, p, maps, tile.row + warp_here * 16, tile.output, sums);
    });
    if (lane() == 0) boxes_wait<0>();
}
