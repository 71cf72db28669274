// moe_grouped_gemm_tma/k_parts.h - products of few strips by sliced-K: the warpgroups multiply different pipeline stages of
// the same strips, and the first part of K gets the sum. One warp decodes a stage of MXFP4 weights more slowly than it is
// loaded. Part p has the stages whose index in the ring is p modulo K_PARTS, so the parts of a pass depend on the stage at
// which it begins: a block must have only one pass.
#pragma once

enum : u32 { PART_ROWS = 8 };  // rows of x that a pass may have

// Computes the products of a pass over all K columns. Only warps of part 0 get the sums, of the first 8 rows of x: the parts
// are added in ascending order. Every consumer warp must call it.
DEV void multiply(PassAccumulators& sums, const StageRing& ring, PipelineState& pipe, u32 k, u32 rows, u32 strips) {
    static_assert(GROUPS % K_PARTS == 0, "every part has the same lines");
    static_assert(WEIGHTS_MXFP4 && GROUP_LINES == 64 && ROWS >= PART_ROWS, "one accumulator for 64 lines");
    constexpr u32 part_threads = LINE_GROUPS * 4 * WARP_SIZE;
    SHARED(f32x4, parts, (K_PARTS - 1) * part_threads);
    multiply_part(sums, ring, pipe, k, rows, strips);
    float(&own)[PART_ROWS / 2] = first_rows<PART_ROWS>(sums.c[0]);
    if (k_part() > 0) parts[tid() - part_threads] = f32x4{{own[0], own[1], own[2], own[3]}};
    named_barrier_sync<1>(CONSUMER_THREADS);
    if (k_part() == 0)
        UNROLL for (u32 part = 0; part < K_PARTS - 1; ++part) {
            const f32x4 other = parts[part * part_threads + tid()];
            UNROLL for (u32 i = 0; i < PART_ROWS / 2; ++i) own[i] += other.v[i];
        }
    named_barrier_sync<1>(CONSUMER_THREADS);
}
