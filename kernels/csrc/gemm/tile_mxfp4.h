// gemm/tile_mxfp4.h - tile_product() for W in MXFP4 (dev/mxfp4.h): packed rows are loaded into registers one step ahead,
// decoded, and stored to shared memory as half_t. Rows of x are copied as in tile.h. K is a multiple of 32.
#pragma once
#include "dev/mxfp4.h"

static_assert(WARPS * WARP_SIZE == 2 * TILE_N && STEP_K == MXFP4_GROUP, "two threads load the group of a row");

// Returns the number of bytes of a matrix of n rows and k columns.
DEV u64 matrix_elements(u32 n, u32 k) { return (u64)n * mxfp4_row_bytes(k); }

// Half of a group of a row of W in registers, and the scale of the group.
struct PackedPiece { u32 v[2], scale; };

// The row of W of which this thread loads half of each group.
struct PackedRow { const u8* row; u32 k; };

DEV PackedRow packed_row(const u8* w, u32 first, u32 n, u32 k) {
    return PackedRow{w + (u64)line_row(tid() / 2, first, n) * mxfp4_row_bytes(k), k};
}
// Loads the half group of this thread in the step at column `at`; past the last column, that of the first step.
DEV PackedPiece load_packed(const PackedRow& w, u32 at) {
    struct alignas(8) WordPair { u32 v[2]; };
    const u32 group = at < w.k ? at / MXFP4_GROUP : 0;
    const WordPair words = load_stream((const WordPair*)(w.row + group * MXFP4_GROUP_BYTES + tid() % 2 * 8));
    return PackedPiece{{words.v[0], words.v[1]}, mxfp4_scales(w.row, w.k)[group]};
}
// Decodes a half group and stores it to the rows of W of a stage.
DEV void store_decoded(half_t* stage, const PackedPiece& p) {
    UNROLL for (u32 i = 0; i < 2; ++i)
        *(half_x8*)(stage + stage_offset(TILE_M + tid() / 2, tid() % 2 * 16 + i * 8)) = decode_mxfp4(p.v[i], p.scale);
}

#if WARP_SIZE == 64
template <class Row> DEV TileAccumulators tile_product(half_t* stage, const Row& x_row, const u8* w, u32 first, u32 n, u32 k) {
    TileAccumulators t = zero_tile();
    TileCopy<half_t, TILE_M, STEP_K, WARPS * WARP_SIZE, 2> copy;
    copy_lines(copy, x_row, x_row(0));
    const PackedRow packed = packed_row(w, first, n, k);
    PackedPiece pieces[2];
    const auto place = [](u32 line, u32 column) { return stage_offset(line, column); };
    copy_steps(stage, place, copy, k, [&](u32 slot, u32 at) { pieces[slot] = load_packed(packed, at); }, [&](u32 slot) {
        store_decoded(stage, pieces[slot]);
        sync();
        multiply_step(t, stage);
    });
    return t;
}
#else
template <class Row> DEV TileAccumulators tile_product(half_t* stages, const Row& x_row, const u8* w, u32 first, u32 n, u32 k) {
    TileAccumulators t = zero_tile();
    const PackedRow packed = packed_row(w, first, n, k);
    const u32 steps = k / STEP_K;
    for (u32 s = 0; s + 1 < STAGES; ++s) {
        if (s < steps) {
            copy_rows(stages + s * STAGE, x_row, k, s * STEP_K);
            store_decoded(stages + s * STAGE, load_packed(packed, s * STEP_K));
        }
        cp_async_commit();
    }
    PackedPiece next = load_packed(packed, (STAGES - 1) * STEP_K);
    for (u32 s = 0; s < steps; ++s) {
        cp_async_wait<STAGES - 2>();
        sync();
        // The copies of the next step overwrite the stage that the previous step has read.
        const u32 ahead = s + STAGES - 1;
        if (ahead < steps) {
            copy_rows(stages + ahead % STAGES * STAGE, x_row, k, ahead * STEP_K);
            store_decoded(stages + ahead % STAGES * STAGE, next);
        }
        cp_async_commit();
        next = load_packed(packed, (ahead + 1) * STEP_K);
        multiply_step(t, stages + s % STAGES * STAGE);
    }
    return t;
}
#endif
