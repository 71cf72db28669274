// gemm/tile.h - a block's tile of x W^T on tensor cores (matrix cores): TILE_M rows of x by TILE_N rows of W,
// K in steps of 32 through shared memory. Copies are STAGES - 1 steps ahead, or two with warps of 64 lanes. The
// caller supplies the addresses of rows of x.
//
// The warps form a grid of WARPS_M x WARPS_N; each computes FRAGS_M x FRAGS_N MMA tiles of 16 x 16.
// -DGATED=1: rows of W are ordered as 16 gate rows, then the 16 up rows of the same outputs, so that a lane
// has gate and up of an output. -DWEIGHTS_MXFP4=1: W is MXFP4 (tile_mxfp4.h). Sums are over ascending k, whatever the tile, so the result of a row is
// bit-identical for any TILE_M and in any batch.
#pragma once
#include "dev/strip.h"

#ifndef TILE_M
#  define TILE_M 128
#endif
#ifndef WEIGHTS_MXFP4
#  define WEIGHTS_MXFP4 0
#endif
#ifndef GATED
#  define GATED 0
#endif

enum : u32 {
    WARPS = 512 / WARP_SIZE >= 16 ? 8 : 4,
    WARPS_M = TILE_M >= 128 ? WARPS / 2 : WARPS / 4,
    WARPS_N = WARPS / WARPS_M,
    TILE_N = 128,
    FRAGS_M = TILE_M / (WARPS_M * 16),
    FRAGS_N = TILE_N / (WARPS_N * 16),
    STEP_K = 32,
    // Row stride. 80 bytes: eight rows have no bank conflicts. With 64 lanes, the order of the vectors of a row avoids
    // conflicts: stage_offset().
    STRIDE = STEP_K + (WARP_SIZE == 64 ? 0 : 8),
    STAGE = (TILE_M + TILE_N) * STRIDE,
    STAGES = WARP_SIZE == 64 ? 1 : 3,  // with 64 lanes the next steps are in registers: tile_registers.h
    OUTPUTS = GATED ? TILE_N / 2 : TILE_N
};
static_assert(FRAGS_M * WARPS_M * 16 == TILE_M && FRAGS_N * WARPS_N * 16 == TILE_N, "warps do not cover the tile");

// Accumulators of a lane, one fragment for each MMA tile of its warp.
struct TileAccumulators { FragC c[FRAGS_M][FRAGS_N]; };
DEV TileAccumulators zero_tile() {
    TileAccumulators t;
    UNROLL for (u32 i = 0; i < FRAGS_M; ++i)
        UNROLL for (u32 j = 0; j < FRAGS_N; ++j) t.c[i][j] = zero_c();
    return t;
}

// Unit of addresses of W.
#if WEIGHTS_MXFP4
typedef u8 WeightElement;
#else
typedef half_t WeightElement;
#endif

// Returns the offset of columns [column, column + 8) of line `line` in a stage. With 64 lanes, the four 16-byte vectors of
// a line are in an order that depends on the line, so that neither copies nor multiply_step() have bank conflicts.
DEV u32 stage_offset(u32 line, u32 column) {
    return line * STRIDE + (WARP_SIZE == 64 ? column ^ line / 2 % 4 * 8 : column);
}

// Returns the index in W of row `r` of the tile. `first`: first output of the tile; `n`: number of rows of W.
// Rows beyond the last output repeat the row of the last output.
DEV u32 line_row(u32 r, u32 first, u32 n) {
    const u32 outputs = GATED ? n / 2 : n;
    const u32 out = first + (GATED ? r / 32 * 16 + r % 16 : r);
    return (out < outputs ? out : outputs - 1) + (GATED && r / 16 % 2 ? outputs : 0);
}

#if WARP_SIZE == 64
#  include "gemm/tile_registers.h"
#else
// Starts copying columns [at, at + 32) (K) of all rows of x and W of the tile to shared memory. x_row(r)
// returns the address of row r of x within the tile, or null for a row of zeros.
template <class Row> DEV void copy_step(half_t* stage, const Row& x_row, const half_t* w, u32 first, u32 n, u32 k, u32 at) {
    for (u32 i = tid(); i < (TILE_M + TILE_N) * (STEP_K / 8); i += WARPS * WARP_SIZE) {
        const u32 line = i / (STEP_K / 8), here = i % (STEP_K / 8) * 8;
        const half_t* row = line < TILE_M ? x_row(line) : w + (u64)line_row(line - TILE_M, first, n) * k;
        const bool present = row && at + here < k;
        cp_async16_zfill(stage + line * STRIDE + here, present ? row + at + here : w, present);
    }
}

// Starts copying columns [at, at + 32) (K) of the rows of x only.
template <class Row> DEV void copy_rows(half_t* stage, const Row& x_row, u32 k, u32 at) {
    for (u32 i = tid(); i < TILE_M * (STEP_K / 8); i += WARPS * WARP_SIZE) {
        const u32 line = i / (STEP_K / 8), here = i % (STEP_K / 8) * 8;
        const half_t* row = x_row(line);
        const bool present = row && at + here < k;
        cp_async16_zfill(stage + line * STRIDE + here, present ? row + at + here : x_row(0), present);
    }
}

DEV void multiply_step(TileAccumulators& t, const half_t* stage) {
    const half_t* x = stage + warp_id() % WARPS_M * FRAGS_M * 16 * STRIDE;
    const half_t* w = stage + (TILE_M + warp_id() / WARPS_M * FRAGS_N * 16) * STRIDE;
    UNROLL for (u32 k = 0; k < STEP_K; k += 16) {
        FragA a[FRAGS_M];
        UNROLL for (u32 i = 0; i < FRAGS_M; ++i) a[i] = load_a(x + i * 16 * STRIDE + k, STRIDE);
        UNROLL for (u32 j = 0; j < FRAGS_N; ++j) {
            const FragB b = load_b(w + j * 16 * STRIDE + k, STRIDE);
            UNROLL for (u32 i = 0; i < FRAGS_M; ++i) mma16(t.c[i][j], a[i], b);
        }
    }
}

#if !WEIGHTS_MXFP4
// Returns the products of the rows of x (x_row) with the rows of W for outputs [first, first + OUTPUTS).
// `stages`: shared memory of STAGES * STAGE elements.
template <class Row> DEV TileAccumulators tile_product(half_t* stages, const Row& x_row, const half_t* w, u32 first,
                                                       u32 n, u32 k) {
    TileAccumulators t = zero_tile();
    const u32 steps = (k + STEP_K - 1) / STEP_K;
    for (u32 s = 0; s + 1 < STAGES; ++s) {
        if (s < steps) copy_step(stages + s * STAGE, x_row, w, first, n, k, s * STEP_K);
        cp_async_commit();
    }
    for (u32 s = 0; s < steps; ++s) {
        cp_async_wait<STAGES - 2>();
        sync();
        // The copies of the next step overwrite the stage that the previous step has read.
        const u32 ahead = s + STAGES - 1;
        if (ahead < steps) copy_step(stages + ahead % STAGES * STAGE, x_row, w, first, n, k, ahead * STEP_K);
        cp_async_commit();
        multiply_step(t, stages + s % STAGES * STAGE);
    }
    return t;
}
#endif
#endif

#if WEIGHTS_MXFP4
#  include "gemm/tile_mxfp4.h"
#else
// Returns the number of elements of a matrix of n rows and k columns.
DEV u64 matrix_elements(u32 n, u32 k) { return (u64)n * k; }
#endif

// Calls put(row, output, value, up value) for every result that this lane has; `row` and `output` are indices
// in the tile. Without GATED the up value is 0.
template <class Put> DEV void each_output(const TileAccumulators& t, const Put& put) {
    const u32 row = warp_id() % WARPS_M * FRAGS_M * 16, column = warp_id() / WARPS_M * FRAGS_N * 16;
    UNROLL for (u32 i = 0; i < FRAGS_M; ++i)
        UNROLL for (u32 j = 0; j < FRAGS_N; j += GATED ? 2 : 1)
            UNROLL for (u32 e = 0; e < FragLayout::NC; ++e) {
                const u32 r = row + i * 16 + FragLayout::c_row(e), c = column + j * 16;
                const float second = GATED ? t.c[i][j + (GATED ? 1 : 0)].x[e] : 0.f;
                put(r, (GATED ? c / 2 : c) + FragLayout::c_col(e), t.c[i][j].x[e], second);
            }
}
