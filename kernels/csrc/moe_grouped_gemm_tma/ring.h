// moe_grouped_gemm_tma/ring.h - ring buffer of pipeline stages between producer and consumer warps, and the
// sizes of its contents.
#pragma once
#include "dev/bulk.h"
#include "dev/wgmma.h"
#include "moe/tma_layout.h"

#ifndef WIDE_TILE
#  define WIDE_TILE 0
#endif
#ifndef TILE_ROWS
#  define TILE_ROWS (WIDE_TILE && !FP8 && !WEIGHTS_MXFP4 ? 128 : 64)
#endif

// Number of parts of K that different warpgroups multiply (multiply_part); more than 1 only with MXFP4 weights.
#ifndef K_PARTS
#  define K_PARTS 1
#endif

enum : u32 {
    // Consumer warpgroups. MXFP4 weights take four: decoding is limited by latency with two warps per scheduler.
    GROUPS = WEIGHTS_MXFP4 && (WIDE_TILE || K_PARTS > 1) ? 4 : 2,
    LINE_GROUPS = GROUPS / K_PARTS,  // warpgroups with different lines of W
    GROUP_LINES = WIDE_TILE && !WEIGHTS_MXFP4 ? 128 : 64,
    ROWS = TILE_ROWS,            // rows of x per tile
    STRIPS = LINE_GROUPS * GROUP_LINES / STRIP_LINES,
    STRIP_BYTES = STRIP_LINES * COLUMN_BYTES,
    WEIGHT_BYTES = (STRIPS * STRIP_BYTES + 1023) / 1024 * 1024,  // panels of x are aligned to 1024 bytes
    PANEL_COLUMNS = 64,          // columns of x per panel
    PANEL_BYTES = ROWS * 128,
    STAGE_BYTES = WEIGHT_BYTES + COLUMNS / PANEL_COLUMNS * PANEL_BYTES,
    CONSUMER_THREADS = GROUPS * 4 * WARP_SIZE,
    ROW_WARPS = 2,               // producer warps that gather rows of x
    ROW_THREADS = ROW_WARPS * WARP_SIZE,
    THREADS = CONSUMER_THREADS + WARP_SIZE + ROW_THREADS,
    MOST_STAGES = FP8 && STRIPS > 8 ? 6 : 12  // maximum that fits in shared memory
};

// Ring buffer of pipeline stages. A stage has COLUMNS columns (K) of the lines (packed rows) of W of the
// pass, then the same columns of the rows of x, both as WGMMA operand panels.
struct StageRing {
    Barrier *full, *empty;
    u8* at;  // aligned to 1024 bytes
    u32 stages;
#if FP8
    float* scales;  // per stage and strip: the scales of its first and second eight lines
#endif
};
#if FP8
DEV float* scales_at(const StageRing& ring, u32 stage) { return ring.scales + stage * (STRIPS * 2); }
#endif
// Index of the current stage, and the parity of its phase for barrier_wait().
struct PipelineState { u32 stage, phase; };
DEV void next(PipelineState& t, const StageRing& ring) {
    if (++t.stage < ring.stages) return;
    t.stage = 0;
    t.phase ^= 1;
}

// Assigns all dynamic shared memory to the ring buffer and initialises its barriers. Every thread of the
// block must call it; a block barrier is needed before the ring buffer is used.
DEV StageRing make_ring() {
    DYN_SHARED(u8, shared);
    SHARED(Barrier, barriers, 2 * MOST_STAGES);
    const u32 fit = (dynamic_shared_bytes() - 1024) / STAGE_BYTES;
    StageRing ring{};
    ring.full = barriers, ring.empty = barriers + MOST_STAGES, ring.at = align_1024(shared);
    ring.stages = fit < MOST_STAGES ? fit : (u32)MOST_STAGES;
    ring.stages -= ring.stages % K_PARTS;  // A stage is always of the same part of K.
#if FP8
    SHARED(float, scales, MOST_STAGES * STRIPS * 2);
    ring.scales = scales;
#endif
    if (tid() == 0) {
        for (u32 i = 0; i < ring.stages; ++i) {
            barrier_init(ring.full + i, 1 + ROW_THREADS);
            barrier_init(ring.empty + i, LINE_GROUPS * 4);
        }
        barriers_ready();
    }
    return ring;
}
