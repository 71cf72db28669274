// gemm_small_m/stream.h - up to 16 rows of x times rows of W that bulk copies stream into shared memory.
//
// The strips of W (8 rows each) are divided equally among the blocks; a block processes TILES strips per pass
// over K. With one block per SM all SMs are busy until the end. One producer warp copies slabs (SLAB columns
// of the strips of a pass) into a ring buffer, which fills the remaining shared memory. The producer starts
// before the previous kernel has ended, because weights do not depend on it. Each consumer warp processes
// SLAB / COMPUTE_WARPS columns of every slab. The sums of the warps are added in shared memory in ascending
// order of warps.
//
// Order of additions: within a warp by ascending slab, then over the warps in ascending order. It depends
// only on K and SLAB; the host chooses SLAB by K only.
//
// Loops without arithmetic are not unrolled, because code size costs time: a block of a small matrix runs for
// 3 us, and instructions that run once are fetched from memory like the weights.
//
//   -DSLAB=256|512|1024  columns of a slab: bulk copies of less than 2 KiB per row are limited by the issue
//                        rate
//   -DTILES=1..8    strips per pass
//   -DX_SLABS=1     x is loaded slab by slab with the weights, for blocks with one pass; else all of x is
//                   staged (rows.h)
// Block: 9 warps. Grid: at most one block per SM and strip. K a multiple of 32; with NORM at most 4096.
// Dynamic shared memory: see `shared_layout`; the remainder is the ring, of at least one stage.
#pragma once
#include "dev/bulk.h"
#include "dev/strip.h"

#ifndef X_SLABS
#  define X_SLABS 0
#endif

#include "gemm_small_m/share.h"
#include "gemm_small_m/slab.h"
#include "gemm_small_m/rows.h"

// Index of the current stage, and the parity of its phase for barrier_wait().
struct PipelineState { u32 stage, phase; };
DEV void next(PipelineState& t, u32 stages) {
    if (++t.stage < stages) return;
    t.stage = 0;
    t.phase ^= 1;
}

DEV void copy_weights(const BlockWork& work, const SharedMemoryLayout& s, u32 stage, u32 pass, u32 slab, u64 policy) {
    const u32 bytes = columns(work, slab) * 2, lines = strips_of(work, pass) * STRIP_ROWS;
    if (lane() == 0) barrier_expect(s.full + stage, (lines + (X_SLABS ? work.m : 0)) * bytes);
    warp_sync();
#pragma unroll 1
    for (u32 line = lane(); line < lines; line += WARP_SIZE)
        bulk_copy_once(s.ring + stage * s.stage_bytes + line * LINE,
                       work.w + weight_row(work, pass, line) * work.k + slab * SLAB, bytes, s.full + stage, policy);
}
DEV void copy_rows(const BlockWork& work, const SharedMemoryLayout& s, u32 stage, u32 slab, const half_t* x,
                   u32 x_stride) {
    u8* to = s.ring + stage * s.stage_bytes + LINES * LINE;
    if (lane() < work.m)
        bulk_copy(to + lane() * LINE, x + (u64)lane() * x_stride + slab * SLAB, columns(work, slab) * 2, s.full + stage);
}

// Waits for the previous kernel; then, with X_SLABS, starts the copies of the columns of x for the stages
// whose weight copies have already been started.
DEV void first_rows(const BlockWork& work, const SharedMemoryLayout& s, u32 ahead, const half_t* x, u32 x_stride) {
    grid_launch_dependents();
    grid_wait();
#if X_SLABS
#pragma unroll 1
    for (u32 i = 0; i < ahead; ++i) copy_rows(work, s, i, i % slabs(work), x, x_stride);
#endif
}

// Loop of the producer warp: copies weights, and with X_SLABS columns of x, into the ring buffer.
DEV void copy_all(const BlockWork& work, const SharedMemoryLayout& s, const half_t* x, u32 x_stride) {
    const u32 per_pass = slabs(work), all = passes(work);
    const u64 policy = read_once();
    u32 i = 0;
    PipelineState pipe{0, 0};
    bool waited = false;
#pragma unroll 1
    for (u32 pass = 0; pass < all; ++pass) {
#pragma unroll 1
        for (u32 slab = 0; slab < per_pass; ++slab, ++i) {
            if (i == s.stages) {
                first_rows(work, s, s.stages, x, x_stride);
                waited = true;
            }
            if (waited) barrier_wait(s.empty + pipe.stage, pipe.phase ^ 1);
            copy_weights(work, s, pipe.stage, pass, slab, policy);
            if (X_SLABS && waited) copy_rows(work, s, pipe.stage, slab, x, x_stride);
            next(pipe, s.stages);
        }
    }
    if (!waited) first_rows(work, s, i, x, x_stride);
}

// Accumulators of a lane, one vector for each strip (8 rows of W) of the pass.
struct PassAccumulators { f32x4 c[TILES]; };

// Adds the product over the columns (K) of one slab (ring-buffer stage) that this warp processes. at[t]: byte
// offset of the row of strip t that this lane reads. `width`: number of columns of the slab.
DEV void multiply_slab(PassAccumulators& sums, const u8* w, const u8* x, const XRowOffsets& rows, const u32* at,
                       u32 width) {
    const u32 first = warp_id() * SPAN;
    if (first + SPAN <= width) {
        multiply_pieces<SPAN / 32, TILES>(sums.c, x + first * 2, rows, w + first * 2, at);
        return;
    }
#pragma unroll 1
    for (u32 k = first; k < width; k += 32) multiply_pieces<1, TILES>(sums.c, x + k * 2, rows, w + k * 2, at);
}

// Writes the sums of this warp for the pass to shared memory as [strip][row of x][row of the strip].
DEV void put_pass(const PassAccumulators& sums, const SharedMemoryLayout& s, u32 m) {
    float* to = s.sums + warp_id() * TILES * m * STRIP_ROWS + strip_c_w(0);
    UNROLL for (u32 half = 0; half < 2; ++half) {
        const u32 row = strip_c_x(half * 2);
        if (row < m)
            UNROLL for (u32 t = 0; t < TILES; ++t)
                *(f32x2*)(to + (t * m + row) * STRIP_ROWS) = f32x2{{sums.c[t].v[half * 2], sums.c[t].v[half * 2 + 1]}};
    }
}
DEV float gather_pass(const SharedMemoryLayout& s, u32 m, u32 t, u32 row, u32 r) {
    const u32 at = (t * m + row) * STRIP_ROWS + r, per_warp = TILES * m * STRIP_ROWS;
    float part[COMPUTE_WARPS];
    UNROLL for (u32 w = 0; w < COMPUTE_WARPS; ++w) part[w] = s.sums[w * per_warp + at];
    float sum = part[0];
    UNROLL for (u32 w = 1; w < COMPUTE_WARPS; ++w) sum += part[w];
    return sum;
}

// Loop of the consumer warps. For every output of the block, one thread calls put(row, output, sum, up sum,
// loaded), where the up sum is used with GATED only. `loaded` is the result of before(row, output, exists),
// which every thread calls before the products, to load data of the epilogue early; `exists` is false on
// threads without an output.
template <class Before, class Put>
DEV void multiply_all(const BlockWork& work, const SharedMemoryLayout& s, const Before& before, const Put& put) {
    const u32 all = passes(work), per_pass = slabs(work), r = tid() % WIDTH;
    const XRowOffsets rows = x_rows(work.m, X_SLABS ? (u32)LINE : x_line(work.k));
    PipelineState pipe{0, 0};
#pragma unroll 1
    for (u32 pass = 0; pass < all; ++pass) {
        const u32 strips = strips_of(work, pass), left = outputs(work) - first_output(work, pass);
        const auto is_output = [&](u32 t, u32 row) { return row < work.m && t < strips && t * WIDTH + r < left; };
        const u32 t0 = tid() / WIDTH % TILES, row0 = tid() / WIDTH / TILES;
        const auto loaded = before(row0, first_output(work, pass) + t0 * WIDTH + r, is_output(t0, row0));
        PassAccumulators sums;
        u32 at[TILES];
        UNROLL for (u32 t = 0; t < TILES; ++t) {
            sums.c[t] = f32x4{{0.f, 0.f, 0.f, 0.f}};
            at[t] = line_of(strips, t < strips ? t : 0, strip_w_row()) * LINE + strip_k() * 2;
        }
#pragma unroll 1
        for (u32 slab = 0; slab < per_pass; ++slab) {
            const u8* w = s.ring + pipe.stage * s.stage_bytes;
            barrier_wait(s.full + pipe.stage, pipe.phase);
            const u8* x = X_SLABS ? w + LINES * LINE : s.x + slab * SLAB * 2;
            multiply_slab(sums, w, x, rows, at, columns(work, slab));
            warp_sync();
            if (lane() == 0) barrier_arrive(s.empty + pipe.stage);
            next(pipe, s.stages);
        }
        if (pass > 0) named_barrier_sync<1>(CONSUMER_THREADS);
        put_pass(sums, s, work.m);
        named_barrier_sync<1>(CONSUMER_THREADS);
#pragma unroll 1
        for (u32 i = tid(); i < work.m * TILES * WIDTH; i += CONSUMER_THREADS) {
            const u32 t = i / WIDTH % TILES, row = i / WIDTH / TILES, out = first_output(work, pass) + t * WIDTH + r;
            if (!is_output(t, row)) continue;
            const float sum = gather_pass(s, work.m, t, row, r);
            const float up = GATED ? gather_pass(s, work.m, t, row, r + WIDTH) : 0.f;
            put(row, out, sum, up, i == tid() ? loaded : before(row, out, true));
        }
    }
}
