// gemm_large_m/ring.h - order in which blocks process tiles, and the ring buffer of pipeline stages between
// producer and consumer warps.
#pragma once
#include "dev/panels.h"

enum : u32 {
    CLUSTER = 2,                  // blocks that share lines of W; each multicasts half of them
    GROUPS = 2,                   // consumer warpgroups, 64 rows each
    TILE_ROWS = GROUPS * 64,
    HALF_LINES = 128,             // lines of W in each half of a tile's lines
    TILE_OUTPUTS = GATED ? HALF_LINES : 2 * HALF_LINES,
    COLUMNS = 64,                 // k per stage, which fill one row of a panel
    LINE_BYTES = COLUMNS * 2,
    X_BYTES = TILE_ROWS * LINE_BYTES,
    HALF_BYTES = HALF_LINES * LINE_BYTES,
    STAGE_BYTES = X_BYTES + 2 * HALF_BYTES,
    STAGES = 4,
    BOXES = 2,                    // output boxes in flight per consumer warp
    CONSUMER_WARPS = GROUPS * 4,  // consumer warps
    PRODUCER_WARPS = 4,
    THREADS = (PRODUCER_WARPS + CONSUMER_WARPS) * WARP_SIZE,
    // Rasterisation for L2 reuse: number of cluster tiles along M that are processed with the same lines
    // (rows of W) before the next lines. The 66 concurrent clusters (one pair of an H100's SMs each) then
    // read about as many different rows of x as rows of W.
    LANE_TILES = 8
};

// Operands and sizes of the GEMM.
struct TmaGemmProblem { HalfMatrixView y, x, w; u32 outputs, k; };
// TMA descriptors of the operands.
struct GemmTensorMaps { const TensorMap *y, *x, *w; };

// Order in which clusters process tiles: in bands of LANE_TILES tiles along M. Within a band, tiles are
// ordered by N first, so that all tiles with the same rows of W are successive. high, wide: number of tiles
// along M and N. count: number of all tiles.
struct TileRasterOrder { u32 high, wide, count; };
// First row and first output of a tile.
struct TileOrigin { u32 row, output; };
DEV TileRasterOrder order_of(const TmaGemmProblem& p) {
    const u32 high = (p.x.rows + CLUSTER * TILE_ROWS - 1) / (CLUSTER * TILE_ROWS);
    const u32 wide = (p.outputs + TILE_OUTPUTS - 1) / TILE_OUTPUTS;
    return TileRasterOrder{high, wide, high * wide};
}
// Returns the origin of the part of cluster tile `i` that this block computes: one of the two halves along M.
DEV TileOrigin tile_at(const TileRasterOrder& order, u32 i) {
    const u32 lane_tiles = LANE_TILES * order.wide, first = i / lane_tiles * LANE_TILES, at = i % lane_tiles;
    const u32 high = order.high - first < LANE_TILES ? order.high - first : (u32)LANE_TILES;
    const u32 row = (first + at % high) * CLUSTER + cluster_rank<CLUSTER>();
    return TileOrigin{row * TILE_ROWS, at / high * TILE_OUTPUTS};
}
// Calls work(tile) for each tile of this block, in the same order in producer and consumers.
template <class Work> DEV void each_tile(const TmaGemmProblem& p, const Work& work) {
    const TileRasterOrder order = order_of(p);
#pragma unroll 1
    for (u32 i = bid_x() / CLUSTER; i < order.count; i += gdim_x() / CLUSTER) work(tile_at(order, i));
}

// Ring buffer of pipeline stages. A stage has the rows of x of this block, then both halves of the rows of W
// of the tile.
struct StageRing { Barrier *full, *empty; u8 *stages, *boxes; };
// Index of the current stage, and the parity of its phase for barrier_wait().
struct PipelineState { u32 stage, phase; };
DEV void advance(PipelineState& t) {
    t.stage = t.stage + 1 == STAGES ? 0 : t.stage + 1;
    t.phase ^= t.stage == 0;
}
// Assigns dynamic shared memory to the ring buffer and initialises its barriers. Every thread of the block
// must call it. The ring buffer may be used after cluster_wait().
DEV StageRing make_ring() {
    DYN_SHARED(u8, dynamic);
    Barrier* barriers = (Barrier*)dynamic;
    u8* stages = align_1024(dynamic + 2 * STAGES * sizeof(Barrier));
    const StageRing ring{barriers, barriers + STAGES, stages, stages + STAGES * STAGE_BYTES};
    if (tid() == 0) {
        for (u32 i = 0; i < STAGES; ++i) {
            barrier_init(ring.full + i, 1);
            barrier_init(ring.empty + i, CLUSTER * CONSUMER_WARPS);
        }
        barriers_ready();
    }
    sync();
    cluster_arrive<CLUSTER>();
    return ring;
}
