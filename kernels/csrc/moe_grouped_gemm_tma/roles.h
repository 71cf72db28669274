// moe_grouped_gemm_tma/roles.h - warp roles of a block: consumer warps multiply, one producer warp copies weights, two
// producer warps gather rows of x. All iterate over the same passes, which the type `Work` (BlockWorkCursor, StripListWork
// or DownCombineWork) defines:
//
//   next_pass(work)    advances to the first pass, then to the next; false after the last
//   work.strips        number of 16-line strips in this pass
//   columns_of(work)   number of columns (k) of this pass
//   copy_strips(work, to, block, full)   one warp copies columns [COLUMNS block, +COLUMNS) of the strips;
//                           `full` counts the bytes
//   work.rows, row_of(work, r)           number of rows of x in this pass, and their row indices
//   scales_of(work, strip, half)         with FP8: scale of eight lines of a strip of the pass, see
//                           moe/tma_layout.h
#pragma once
#include "dev/strip.h"
#include "dev/wgmma.h"
#include "moe_grouped_gemm_tma/ring.h"

enum : u32 { WEIGHT_WARP = CONSUMER_THREADS / WARP_SIZE };

// Copies columns [COLUMNS * block, COLUMNS * (block + 1)) of the weights of a pass into a free pipeline
// stage. Called by the producer warp that copies weights.
template <class Work> DEV void copy_block(const Work& work, const StageRing& ring, u32 stage, u32 block) {
    if (lane() == 0) barrier_expect(ring.full + stage, work.strips * STRIP_BYTES);
    warp_sync();
    copy_strips(work, ring.at + stage * STAGE_BYTES, block, ring.full + stage);
}

// Loop of the producer warp that copies weights. `begun`: number of pipeline stages whose weight copies
// begin_weights() has already started.
template <class Work> DEV void copy_weights(Work work, const StageRing& ring, u32 begun = 0) {
    PipelineState pipe{0, 0};
    while (next_pass(work))
#pragma unroll 1
        for (u32 block = 0; block < column_blocks(columns_of(work)); ++block) {
            if (begun > 0) {
                --begun;
                next(pipe, ring);
                continue;
            }
            barrier_wait(ring.empty + pipe.stage, pipe.phase ^ 1);
            copy_block(work, ring, pipe.stage, block);
            next(pipe, ring);
        }
}

// Copies eight columns of a row of x, from column `at` + 8 `piece` on. `from`: address of column 8 `piece`. In MXFP4 the
// last block of columns is padded; zeros are stored for the columns from `k` on.
DEV void copy_piece(u8* to, const half_t* from, u32 piece, u32 at, u32 k) {
#if WEIGHTS_MXFP4
    const bool present = at + piece * 8 < k;
    cp_async16_zfill(to, present ? from + at : from, present);
#else
    (void)piece, (void)k;
    cp_async16(to, from + at);
#endif
}

template <class Work> DEV void copy_rows(Work work, const StageRing& ring, const half_t* x, u32 x_stride) {
    enum : u32 { ROWS_PER_PASS = ROW_THREADS / PIECES };
    const u32 t = tid() - CONSUMER_THREADS - WARP_SIZE, line = t / PIECES, piece = t % PIECES;
    const u32 place = panel_offset(line, piece);
    PipelineState pipe{0, 0};
    while (next_pass(work)) {
        const u32 rows = work.rows;
#if FP8
        static_assert(STRIPS * 2 <= ROW_THREADS, "a scale a thread");
        const float* scales = t < work.strips * 2 ? scales_of(work, t / 2, t % 2) : nullptr;
#endif
        const half_t* from[ROWS / ROWS_PER_PASS];
        UNROLL for (u32 i = 0; i < ROWS / ROWS_PER_PASS; ++i) {
            const u32 row = line + i * ROWS_PER_PASS;
            from[i] = x + (u64)(row < rows ? row_of(work, row) : 0) * x_stride + piece * 8;
        }
#pragma unroll 1
        for (u32 block = 0; block < column_blocks(columns_of(work)); ++block) {
            barrier_wait(ring.empty + pipe.stage, pipe.phase ^ 1);
            u8* to = ring.at + pipe.stage * STAGE_BYTES + WEIGHT_BYTES + place;
            UNROLL for (u32 p = 0; p < COLUMNS / PANEL_COLUMNS; ++p)
                UNROLL for (u32 i = 0; i < ROWS / ROWS_PER_PASS; ++i)
                    if (line + i * ROWS_PER_PASS < rows)
                        copy_piece(to + p * PANEL_BYTES + i * ROWS_PER_PASS * 128, from[i], piece, block * COLUMNS + p * PANEL_COLUMNS,
                                   columns_of(work));
#if FP8
            if (scales) cp_async4(scales_at(ring, pipe.stage) + t, scales + block);
#endif
            barrier_arrive_copied(ring.full + pipe.stage);
            next(pipe, ring);
        }
    }
    cp_async_commit();
    cp_async_wait<0>();
}

// Accumulators of a lane: c[t] is the result of the WGMMAs for 64 lines (packed rows of W). Element 4 j + 2 l
// + i of c[t] is the product of line warp_id() % 4 * 16 + lane() / 4 + 8 l with row 8 j + lane() % 4 * 2 + i
// of x.
struct PassAccumulators { float c[GROUP_LINES / 64][ROWS / 2]; };
// Returns the index in the pass of the strip (16 lines) to which the accumulators c[t] of this warp belong.
DEV u32 strip_of_sums(u32 t) {
    const u32 group = K_PARTS > 1 ? warp_id() / 4 % LINE_GROUPS : warp_id() / 4;
    return group * (GROUP_LINES / STRIP_LINES) + t * 4 + warp_id() % 4;
}
// Returns the part of K that this consumer warp multiplies.
DEV u32 k_part() { return K_PARTS > 1 ? warp_id() / 4 / LINE_GROUPS : 0; }

#if FP8 || WEIGHTS_MXFP4
#  if FP8
#    include "moe_grouped_gemm_tma/multiply_fp8.h"
#  else
#    include "moe_grouped_gemm_tma/multiply_mxfp4.h"
#  endif
// Returns whether this warpgroup has strips in a pass of `strips` strips. Checked only in MXFP4 tiles of at most 16 rows: a
// branch around the WGMMAs makes larger tiles 3 % slower.
DEV bool has_strips(u32 strips) { return !WEIGHTS_MXFP4 || ROWS > 16 || strip_of_sums(0) / 4 * 4 < strips; }

// Computes the products of a pass over all K columns, stage by stage; with K_PARTS over the stages of the part of K of this
// warp. `rows`: rows of x in the pass. `strips`: strips of the pass.
DEV void multiply_part(PassAccumulators& sums, const StageRing& ring, PipelineState& pipe, u32 k, u32 rows, u32 strips) {
    const bool present = has_strips(strips);
    UNROLL for (u32 t = 0; t < GROUP_LINES / 64; ++t)
        UNROLL for (u32 i = 0; i < ROWS / 2; ++i) sums.c[t][i] = 0.f;
#pragma unroll 1
    for (u32 block = 0; block < column_blocks(k); ++block, next(pipe, ring)) {
        if (K_PARTS > 1 && pipe.stage % K_PARTS != k_part()) continue;
        barrier_wait(ring.full + pipe.stage, pipe.phase);
        fence_async_shared();  // Needed for rows of x, which cp.async writes, not the async proxy.
#if FP8
        multiply_stage(sums, ring.at + pipe.stage * STAGE_BYTES, scales_at(ring, pipe.stage));
#else
        if (present) multiply_stage(sums, ring.at + pipe.stage * STAGE_BYTES, rows);
#endif
        warp_sync();
        if (lane() == 0) barrier_arrive(ring.empty + pipe.stage);
    }
}
#  if K_PARTS > 1
#    include "moe_grouped_gemm_tma/k_parts.h"
#  else
DEV void multiply(PassAccumulators& sums, const StageRing& ring, PipelineState& pipe, u32 k, u32 rows, u32 strips) {
    multiply_part(sums, ring, pipe, k, rows, strips);
}
#  endif
#else
// Computes the products of a pass over all K columns, stage by stage. The number of rows and of strips does not matter.
DEV void multiply(PassAccumulators& sums, const StageRing& ring, PipelineState& pipe, u32 k, u32, u32) {
    UNROLL for (u32 t = 0; t < GROUP_LINES / 64; ++t)
        UNROLL for (u32 i = 0; i < ROWS / 2; ++i) sums.c[t][i] = 0.f;
    const auto release = [&](u32 stage) {
        warp_sync();
        if (lane() == 0) barrier_arrive(ring.empty + stage);
    };
    u32 before = 0;
    const u32 blocks = k / COLUMNS;
    u32 block = 0;
#pragma unroll 1
    do {
        barrier_wait(ring.full + pipe.stage, pipe.phase);
        fence_async_shared();  // Needed for rows of x, which cp.async writes, not the async proxy.
        const u8* stage = ring.at + pipe.stage * STAGE_BYTES;
        const KMajorOperand w = by_k(stage + warp_id() / 4 * GROUP_LINES * COLUMN_BYTES), x = by_k(stage + WEIGHT_BYTES);
        wgmma_fence();
        UNROLL for (u32 i = 0; i < COLUMNS / 16; ++i)
            UNROLL for (u32 t = 0; t < GROUP_LINES / 64; ++t)
                wgmma<ROWS>(sums.c[t], advanced(w, t * 64 * COLUMN_BYTES + i * 32), advanced(x, i * 32), true);
        wgmma_commit();
        if (block > 0) {
            wgmma_wait<1>();
            release(before);
        }
        before = pipe.stage;
        next(pipe, ring);
    } while (++block < blocks);
    wgmma_wait<0>();
    UNROLL for (u32 t = 0; t < GROUP_LINES / 64; ++t) wgmma_fence_operand(sums.c[t]);
    release(before);
}
#endif
