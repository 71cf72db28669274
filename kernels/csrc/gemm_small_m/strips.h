// gemm_small_m/strips.h - up to 16 rows of x times strips of W, each streamed once; shared by gemm_small_m
// and the MoE expert kernels.
//
// A block processes TILES strips of rows of W over all of K; its warps take chunks of 128 k in turn, so that
// every warp streams 256 consecutive bytes of each row straight into the MMA. Loads of DEPTH strips are in
// flight before the first one is used. They start before grid_wait(), because weights do not depend on the
// previous kernel. The warps' sums are added in shared memory in ascending order.
//
// Order of additions: k ascending within a chunk, then the warp's chunks ascending, then warps ascending. It
// depends only on K and the number of warps, so that a row gives the same bits in any batch.
//
//   -DGATED=1       a strip has gate rows and the up rows of the same outputs
//   -DTILES=1..8    strips per block
// Dynamic shared memory: M * (K rounded up to 128, + 32) * 2 + warps * TILES * STRIP_ROWS * M * 4 bytes.
#pragma once
#include "dev/strip.h"
#include "dev/register_copy.h"

#ifndef TILES
#  define TILES 2
#endif
#ifndef GATED
#  define GATED 0
#endif

enum : u32 {
    CHUNK = 128,          // k per warp and iteration: 256 bytes of a row
    PIECES = CHUNK / 32,  // 16-byte loads per lane, strip and chunk
    DEPTH = 3,            // strips in flight per warp
    // Outputs per strip: a strip has gate and up rows of the same outputs.
    WIDTH = STRIP_ROWS / (GATED ? 2 : 1)
};

// Matrix W, and the first output of the block, from which its strips are read.
struct StripWeights {
    const half_t* w;
    u32 first, n, k;  // first output of the block; rows and columns of W
};

// Returns the row of W that this lane reads for a strip. Beyond the last output it is the row of the last
// output again; the results are not stored.
DEV u64 weight_row(const StripWeights& w, u32 tile) {
    const u32 r = strip_w_row(), out = w.first + tile * WIDTH + r % WIDTH, outputs = GATED ? w.n / 2 : w.n;
    return (out < outputs ? out : outputs - 1) + (r < WIDTH ? 0 : outputs);
}

// A lane's pieces of one strip of W for one chunk of k.
struct StripPieces { half_x8 v[PIECES]; };

DEV StripPieces load_strip(const StripWeights& w, u32 tile, u32 chunk) {
    const half_t* p = w.w + weight_row(w, tile) * w.k;
    StripPieces s;
    UNROLL for (u32 i = 0; i < PIECES; ++i) {
        const u32 k = chunk * CHUNK + i * 32 + strip_k();
#if WARP_SIZE == 64
        // No branch, because on AMD a branch ends with a wait for the load inside it. Columns past the last
        // one read the start of the row instead; they are multiplied by zeros of x.
        s.v[i] = load_stream((const half_x8*)(p + (k < w.k ? k : 0)));
#else
        s.v[i] = k < w.k ? load_stream((const half_x8*)(p + k)) : zero8();
#endif
    }
    return s;
}

// Iterates over the warp's work: its chunks of one strip, then those of the next strip.
struct ChunkCursor { u32 tile, chunk; };
DEV void advance(ChunkCursor& at, u32 warps, u32 chunks) {
    at.chunk += warps;
    if (at.chunk < chunks) return;
    at.chunk = warp_id();
    ++at.tile;
}

// Loads the strip at `at` if `present`. Warps of 64 lanes load without a branch: past the end they load the
// last strip again.
DEV void load_next(StripPieces& strip, const StripWeights& w, const ChunkCursor& at, bool present) {
#if WARP_SIZE == 64
    (void)present;
    const bool inside = at.tile < TILES;
    strip = load_strip(w, inside ? at.tile : TILES - 1, inside ? at.chunk : warp_id());
#else
    if (present) strip = load_strip(w, at.tile, at.chunk);
#endif
}

// Row stride of x in shared memory: rows are zero-filled to a multiple of CHUNK, and 32 values of padding
// avoid bank conflicts between rows.
DEV u32 x_stride(u32 k) { return (k + CHUNK - 1) / CHUNK * CHUNK + 32; }

// Copies rows of x to shared memory; x_row(r) returns row r.
template <class Row> DEV void stage_rows(half_t* xs, const Row& x_row, u32 m, u32 k) {
    const u32 pieces = (x_stride(k) - 32) / 8;
    for (u32 i = tid(); i < m * pieces; i += bdim()) {
        const u32 row = i / pieces, at = i % pieces * 8;
        *(half_x8*)(xs + row * x_stride(k) + at) = at < k ? *(const half_x8*)(x_row(row) + at) : zero8();
    }
}

DEV void multiply(f32x4& c, const StripPieces& w, const half_t* xs, u32 m, u32 stride, u32 chunk) {
    UNROLL for (u32 i = 0; i < PIECES; ++i) {
        StripOperandA x;
        UNROLL for (u32 j = 0; j < STRIP_X; ++j) {
            const u32 row = strip_x_row(j), k = chunk * CHUNK + i * 32 + strip_k();
#if WARP_SIZE == 64
            // Sums of rows past m are not stored.
            x.v[j] = bits_as<half_x8>(load_piece(xs + (row < m ? row : 0) * stride + k));
#else
            x.v[j] = row < m ? *(const half_x8*)(xs + row * stride + k) : zero8();
#endif
        }
        strip_mma(c, x, w.v[i]);
    }
}

// Writes the warp's sums of a strip to shared memory, and resets them to zero.
DEV void put_sums(f32x4& c, float* sums, u32 m, u32 tile) {
    UNROLL for (u32 e = 0; e < 4; ++e) {
        const u32 row = strip_c_x(e);
        if (row < m) sums[((warp_id() * TILES + tile) * m + row) * STRIP_ROWS + strip_c_w(e)] = c.v[e];
        c.v[e] = 0.f;
    }
}

// Returns the sum of line r of a strip and row `m` (of m_count) over the warps that have a chunk.
DEV float gather(const float* sums, u32 k, u32 m_count, u32 tile, u32 m, u32 r) {
    const u32 chunks = (k + CHUNK - 1) / CHUNK, all = bdim() / WARP_SIZE, warps = chunks < all ? chunks : all;
    const u32 at = (tile * m_count + m) * STRIP_ROWS + r, per_warp = TILES * m_count * STRIP_ROWS;
    float s = sums[at];
    for (u32 w = 1; w < warps; ++w) s += sums[w * per_warp + at];
    return s;
}

// Computes the sums of all strips of the block, which gather() reads. `stage(xs)` stages the rows of x; it is
// called after grid_wait().
template <class Stage> DEV const float* strip_sums(const StripWeights& weights, u32 m, const Stage& stage) {
    DYN_SHARED(half_t, xs);
    const u32 warps = bdim() / WARP_SIZE, stride = x_stride(weights.k), chunks = (weights.k + CHUNK - 1) / CHUNK;
    float* sums = (float*)(xs + m * stride);
    const u32 mine = warp_id() < chunks ? (chunks - warp_id() + warps - 1) / warps : 0, items = mine * TILES;

    ChunkCursor to_load{0, warp_id()}, at{0, warp_id()};
    StripPieces ring[DEPTH];
    UNROLL for (u32 d = 0; d < DEPTH; ++d) {
        load_next(ring[d], weights, to_load, d < items);
        advance(to_load, warps, chunks);
    }
    grid_launch_dependents();
    grid_wait();
    stage(xs);
    sync();

    f32x4 c{{0.f, 0.f, 0.f, 0.f}};
    for (u32 i = 0; i < items; i += DEPTH) {
        UNROLL for (u32 d = 0; d < DEPTH; ++d) {
            if (i + d < items) {
                multiply(c, ring[d], xs, m, stride, at.chunk);
                const u32 tile = at.tile;
                advance(at, warps, chunks);
                if (at.tile != tile) put_sums(c, sums, m, tile);
                load_next(ring[d], weights, to_load, i + d + DEPTH < items);
                advance(to_load, warps, chunks);
            }
        }
    }
    sync();
    return sums;
}

// Calls put(row, output, sum, sum of the up row or 0) for each output of the block, one output per thread.
template <class Put> DEV void each_sum(const StripWeights& w, const float* sums, u32 m, const Put& put) {
    const u32 outputs = GATED ? w.n / 2 : w.n;
    for (u32 i = tid(); i < TILES * WIDTH * m; i += bdim()) {
        const u32 r = i % WIDTH, row = i / WIDTH % m, tile = i / WIDTH / m, out = w.first + tile * WIDTH + r;
        if (out >= outputs) continue;
        put(row, out, gather(sums, w.k, m, tile, row, r), GATED ? gather(sums, w.k, m, tile, row, r + WIDTH) : 0.f);
    }
}
