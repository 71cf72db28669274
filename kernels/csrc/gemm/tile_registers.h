// gemm/tile_registers.h - tile_product() for wavefronts of 64 lanes: rows are loaded into registers two steps
// ahead (dev/tile_copy.h). The MMA operands have the layout of dev/strip.h: 16-byte vectors along K as they
// are in shared memory, so fragments are not repacked.
#pragma once
#include "dev/tile_copy.h"

DEV half_x8 stage_piece(const half_t* p) { return bits_as<half_x8>(load_piece(p)); }

// Adds the products of one step in shared memory. With 64 lanes, a FragC accumulator has the register layout
// of the accumulators of strip_mma().
DEV void multiply_step(TileAccumulators& t, const half_t* stage) {
    const half_t* x = stage + warp_id() % WARPS_M * FRAGS_M * 16 * STRIDE + stage_offset(strip_x_row(0), strip_k());
    const half_t* w = stage + (TILE_M + warp_id() / WARPS_M * FRAGS_N * 16) * STRIDE + stage_offset(strip_w_row(), strip_k());
    StripOperandA a[FRAGS_M];
    UNROLL for (u32 i = 0; i < FRAGS_M; ++i) a[i].v[0] = stage_piece(x + i * 16 * STRIDE);
    UNROLL for (u32 j = 0; j < FRAGS_N; ++j) {
        const half_x8 b = stage_piece(w + j * 16 * STRIDE);
        UNROLL for (u32 i = 0; i < FRAGS_M; ++i) {
            f32x4 sum = bits_as<f32x4>(t.c[i][j]);
            strip_mma(sum, a[i], b);
            t.c[i][j] = bits_as<FragC>(sum);
        }
    }
}

#if !WEIGHTS_MXFP4
// Returns the products of the rows of x (x_row) with the rows of W for outputs [first, first + OUTPUTS).
// `stage`: shared memory of STAGE elements.
template <class Row> DEV TileAccumulators tile_product(half_t* stage, const Row& x_row, const half_t* w, u32 first,
                                                       u32 n, u32 k) {
    TileAccumulators t = zero_tile();
    TileCopy<half_t, TILE_M + TILE_N, STEP_K, WARPS * WARP_SIZE, 2> copy;
    const auto line = [&](u32 r) -> const half_t* {
        return r < TILE_M ? x_row(r) : w + (u64)line_row(r - TILE_M, first, n) * k;
    };
    copy_lines(copy, line, w);
    const auto place = [](u32 line, u32 column) { return stage_offset(line, column); };
    copy_steps(stage, place, copy, k, [](u32, u32) {}, [&](u32) { multiply_step(t, stage); });
    return t;
}
#endif
