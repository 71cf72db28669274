// gemm/tile_mxfp4.h - tile_product() for W in MXFP4 (dev/mxfp4.h): packed rows are loaded into registers one step ahead,
// decoded, and stored to shared memory as half_t. Rows of x are copied as in tile.h. K is a multiple of 32. Warps of 64 lanes
// load two steps ahead; W has less than 4 GiB.
#pragma once
#include "dev/mxfp4.h"

static_assert(WARPS * WARP_SIZE == 2 * TILE_N && STEP_K == MXFP4_GROUP, "two threads load the group of a row");

// Returns the number of bytes of a matrix of n rows and k columns.
DEV u64 matrix_elements(u32 n, u32 k) { return (u64)n * mxfp4_row_bytes(k); }

// Half of a group of a row of W in registers, and the scale of the group.
struct PackedPiece { u32 v[2], scale; };

#if WARP_SIZE == 64
// The row of W of which this thread loads half of each group, as its offset in W in bytes: AMD GPUs add a 32-bit offset to an
// address in scalar registers.
struct PackedRow { const u8* w; u32 row, k; };
DEV PackedRow packed_row(const u8* w, u32 first, u32 n, u32 k) {
    return PackedRow{w, line_row(tid() / 2, first, n) * mxfp4_row_bytes(k), k};
}
DEV const u8* words_of(const PackedRow& w, u32 group) { return w.w + (w.row + group * MXFP4_GROUP_BYTES + tid() % 2 * 8); }
DEV u32 scale_of(const PackedRow& w, u32 group) { return w.w[w.row + w.k / 2 + group]; }
DEV PackedPiece pinned(const PackedPiece& p) { return PackedPiece{{pinned(p.v[0]), pinned(p.v[1])}, pinned(p.scale)}; }
#else
// The row of W of which this thread loads half of each group.
struct PackedRow { const u8* row; u32 k; };
DEV PackedRow packed_row(const u8* w, u32 first, u32 n, u32 k) {
    return PackedRow{w + (u64)line_row(tid() / 2, first, n) * mxfp4_row_bytes(k), k};
}
DEV const u8* words_of(const PackedRow& w, u32 group) { return w.row + group * MXFP4_GROUP_BYTES + tid() % 2 * 8; }
DEV u32 scale_of(const PackedRow& w, u32 group) { return mxfp4_scales(w.row, w.k)[group]; }
#endif
// Loads the half group of this thread in the step at column `at`; past the last column, that of the first step.
DEV PackedPiece load_packed(const PackedRow& w, u32 at) {
    struct alignas(8) WordPair { u32 v[2]; };
    const u32 group = at < w.k ? at / MXFP4_GROUP : 0;
    const WordPair words = load_stream((const WordPair*)words_of(w, group));
    return PackedPiece{{words.v[0], words.v[1]}, scale_of(w, group)};
}
// Decodes a half group and stores it to the rows of W of a stage.
DEV void store_decoded(half_t* stage, const PackedPiece& p) {
    UNROLL for (u32 i = 0; i < 2; ++i)
        *(half_x8*)(stage + stage_offset(TILE_M + tid() / 2, tid() % 2 * 16 + i * 8)) = decode_mxfp4(p.v[i], p.scale);
}

#if WARP_SIZE == 64
// Rows of x and packed rows of W are loaded AHEAD steps ahead: the piece of a step is replaced when it has been stored. Past
// the last step, steps are stored and not multiplied.
template <class Row> DEV TileAccumulators tile_product(half_t* stage, const Row& x_row, const u8* w, u32 first, u32 n, u32 k) {
    enum : u32 { AHEAD = 2 };
    TileAccumulators t = zero_tile();
    TileCopy<half_t, TILE_M, STEP_K, WARPS * WARP_SIZE, AHEAD> copy;
    copy_lines(copy, x_row, x_row(0));
    const PackedRow packed = packed_row(w, first, n, k);
    PackedPiece pieces[AHEAD];
    const auto place = [](u32 line, u32 column) { return stage_offset(line, column); };
    const auto load = [&](u32 d, u32 at) {
        pieces[d] = load_packed(packed, at);
        keep_load_order();
    };
    UNROLL for (u32 d = 0; d < AHEAD; ++d) {
        UNROLL for (u32 p = 0; p < copy.COUNT; ++p) copy_load(copy, p, d, k, d * STEP_K);
        load(d, d * STEP_K);
    }
    for (u32 begin = 0; begin < k; begin += AHEAD * STEP_K) {
        UNROLL for (u32 d = 0; d < AHEAD; ++d) {
            const u32 at = begin + d * STEP_K;
            UNROLL for (u32 p = 0; p < copy.COUNT; ++p) {
                copy_store(stage, place, copy, p, d, k, at);
                copy_load(copy, p, d, k, at + AHEAD * STEP_K);
            }
            store_decoded(stage, pinned(pieces[d]));
            load(d, at + AHEAD * STEP_K);
            sync();
            if (at < k) multiply_step(t, stage);
            sync();
        }
    }
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
