// gemm_small_m/strips.h - product of up to 16 rows of x with strips of W, used by gemm_small_m and the MoE
// expert kernels. A strip is STRIP_ROWS consecutive rows of W; each strip is read from memory once.
//
// A block processes TILES strips of W over all of K. Its warps process chunks of 128 columns in turn, so that
// a warp loads 256 consecutive bytes of each row directly into MMA operand registers. Loads of DEPTH strips
// are in flight before the first strip is used. With warps of 32 lanes these loads start before grid_wait(), because
// weights do not depend on the previous kernel. The sums of the warps are added in shared memory in ascending order of
// warps.
//
// Order of additions: ascending k within a chunk (MXFP4: every fourth vector of eight columns in turn), then ascending chunks within a warp, then ascending warps.
// It depends only on K and the number of warps, so the result of a row is bit-identical in any batch.
//
//   -DGATED=1       a strip has gate rows and the up rows of the same outputs
//   -DTILES=1..8    strips per block
//   -DWEIGHTS_MXFP4=1  W is MXFP4 (dev/mxfp4.h); K is a multiple of 32
// Dynamic shared memory: M * (K rounded up to 128, + X_PADDING) * 2 + warps * TILES * STRIP_ROWS * M * 4 bytes.
#pragma once
#include "dev/strip.h"
#include "dev/register_copy.h"

#ifndef TILES
#  define TILES 2
#endif
#ifndef WEIGHTS_MXFP4
#  define WEIGHTS_MXFP4 0
#endif
#ifndef GATED
#  define GATED 0
#endif

enum : u32 {
    CHUNK = 128,          // k per warp and iteration: 256 bytes of a row
    PIECES = CHUNK / 32,  // 16-byte loads per lane, strip and chunk
    DEPTH = 3,            // strips in flight per warp
    STAGE_DEPTH = 8,      // loads of x in flight per lane
    // Outputs per strip. With GATED, half of the rows of a strip are gate rows, the other half the up rows of
    // the same outputs.
    WIDTH = STRIP_ROWS / (GATED ? 2 : 1),
    // Elements after each row of x in shared memory, which avoid bank conflicts between rows; 64 lanes: as KEY_PADDING
    // of attention/warp.h.
    X_PADDING = WARP_SIZE == 64 ? 16 : 32
};

// Unit of addresses of W.
#if WEIGHTS_MXFP4
typedef u8 WeightElement;
#else
typedef half_t WeightElement;
#endif

// Matrix W, and the first output of the block; the strips of the block begin at this output.
struct StripWeights {
    const WeightElement* w;
    u32 first, n, k;  // first output of the block; rows and columns of W
};

// Returns the row of W that this lane reads for strip `tile` of the block. Rows beyond the last output repeat
// the row of the last output; their results are not stored.
DEV u64 weight_row(const StripWeights& w, u32 tile) {
    const u32 r = strip_w_row(), out = w.first + tile * WIDTH + r % WIDTH, outputs = GATED ? w.n / 2 : w.n;
    return (out < outputs ? out : outputs - 1) + (r < WIDTH ? 0 : outputs);
}

#if WEIGHTS_MXFP4
#  include "gemm_small_m/weights_mxfp4.h"
#else
#  include "gemm_small_m/weights_half.h"
#endif

// Iterates over the work of a warp: its chunks (128 columns of K each) of one strip, then its chunks of the
// next strip.
struct ChunkCursor { u32 tile, chunk; };
DEV void advance(ChunkCursor& at, u32 warps, u32 chunks) {
    at.chunk += warps;
    if (at.chunk < chunks) return;
    at.chunk = warp_id();
    ++at.tile;
}

// Loads the weights of the strip and chunk at `at` into `strip` if `present` is true. Warps of 64 lanes load
// without a branch: if `present` is false, they load the last strip again.
DEV void load_next(StripPieces& strip, const StripWeights& w, const ChunkCursor& at, bool present) {
#if WARP_SIZE == 64
    (void)present;
    const bool inside = at.tile < TILES;
    strip = load_strip(w, inside ? at.tile : TILES - 1, inside ? at.chunk : warp_id());
#else
    if (present) strip = load_strip(w, at.tile, at.chunk);
#endif
}

// Row stride of x in shared memory: rows are zero-filled to a multiple of CHUNK.
DEV u32 x_stride(u32 k) { return (k + CHUNK - 1) / CHUNK * CHUNK + X_PADDING; }

// Position of a 16-byte vector of x: its row, and its index in the row.
struct StagedVector { u32 row, index; };

#if WARP_SIZE == 64
// Vectors of x that a lane has loaded and not stored yet. A lane without a vector has the first one of x, at a row beyond the last one.
struct StagedRows {
    StagedVector at[STAGE_DEPTH];
    u32x4 loaded[STAGE_DEPTH];
};

// Stores vector j to shared memory.
DEV void store_staged(half_t* xs, const StagedRows& rows, u32 j, u32 m, u32 k) {
    const u32x4 vector = pinned(rows.loaded[j]);
    const StagedVector at = rows.at[j];
    if (at.row < m) store_loaded(xs + at.row * x_stride(k) + at.index * 8, vector, at.index * 8 < k);
}

// Copies the rows of x to shared memory, but for the last vectors, which finish_rows() stores; x_row(r) returns the address of row r,
// and every lane calls it. A lane has STAGE_DEPTH loads in flight at every wait: each vector that has been stored is replaced by a
// later one.
template <class Row> DEV StagedRows begin_rows(half_t* xs, const Row& x_row, u32 m, u32 k) {
    const u32 pieces = (x_stride(k) - X_PADDING) / 8;
    const StagedVector step{bdim() / pieces, bdim() % pieces};
    StagedVector next{tid() / pieces, tid() % pieces};
    StagedRows rows;
    const auto load = [&](u32 j) {
        const bool present = next.row < m && next.index * 8 < k;
        rows.loaded[j] = load_piece(x_row(next.row < m ? next.row : 0) + (present ? next.index * 8 : 0));
        keep_load_order();
        rows.at[j] = next;
        next.index += step.index;
        const bool wraps = next.index >= pieces;
        next = {next.row + step.row + wraps, next.index - (wraps ? pieces : 0)};
    };
    UNROLL for (u32 j = 0; j < STAGE_DEPTH; ++j) load(j);
    for (u32 later = (m * pieces - 1) / (STAGE_DEPTH * bdim()); later != 0; --later)
        UNROLL for (u32 j = 0; j < STAGE_DEPTH; ++j) {
            store_staged(xs, rows, j, m, k);
            load(j);
        }
    return rows;
}

DEV void finish_rows(half_t* xs, const StagedRows& rows, u32 m, u32 k) {
    UNROLL for (u32 j = 0; j < STAGE_DEPTH; ++j) store_staged(xs, rows, j, m, k);
}
#else
// Copies the rows of x to shared memory; x_row(r) returns the address of row r.
template <class Row> DEV void stage_rows(half_t* xs, const Row& x_row, u32 m, u32 k) {
    const u32 pieces = (x_stride(k) - X_PADDING) / 8;
    for (u32 i = tid(); i < m * pieces; i += bdim()) {
        const u32 row = i / pieces, at = i % pieces * 8;
        *(half_x8*)(xs + row * x_stride(k) + at) = at < k ? *(const half_x8*)(x_row(row) + at) : zero8();
    }
}
#endif

DEV void multiply(f32x4& c, const StripPieces& w, const half_t* xs, u32 m, u32 stride, u32 chunk) {
    UNROLL for (u32 i = 0; i < PIECES; ++i) {
        StripOperandA x;
        UNROLL for (u32 j = 0; j < STRIP_X; ++j) {
            const u32 row = strip_x_row(j), k = piece_column(chunk, i);
#if WARP_SIZE == 64
            // Rows from m on read row 0 instead; their sums are not stored.
            x.v[j] = bits_as<half_x8>(load_piece(xs + (row < m ? row : 0) * stride + k));
#else
            x.v[j] = row < m ? *(const half_x8*)(xs + row * stride + k) : zero8();
#endif
        }
        strip_mma(c, x, weight_piece(w, i));
    }
}

// Writes the sums `c` of this warp for strip `tile` to shared memory, and resets `c` to zero.
DEV void put_sums(f32x4& c, float* sums, u32 m, u32 tile) {
    UNROLL for (u32 e = 0; e < 4; ++e) {
        const u32 row = strip_c_x(e);
        if (row < m) sums[((warp_id() * TILES + tile) * m + row) * STRIP_ROWS + strip_c_w(e)] = c.v[e];
        c.v[e] = 0.f;
    }
}

// Returns the product of row r of strip `tile` with row `m` of x: the total of the sums of all warps that
// have processed a chunk. `m_count`: number of rows of x.
DEV float gather(const float* sums, u32 k, u32 m_count, u32 tile, u32 m, u32 r) {
    const u32 chunks = (k + CHUNK - 1) / CHUNK, all = bdim() / WARP_SIZE, warps = chunks < all ? chunks : all;
    const u32 at = (tile * m_count + m) * STRIP_ROWS + r, per_warp = TILES * m_count * STRIP_ROWS;
    float s = sums[at];
    for (u32 w = 1; w < warps; ++w) s += sums[w * per_warp + at];
    return s;
}

#if WARP_SIZE == 64
// How the rows of x are copied to shared memory: rows at x_row(r), which every lane calls.
template <class Row> struct RowStage {
    const Row& x_row;
    u32 m, k;
};
template <class Row> DEV StagedRows begin_stage(const RowStage<Row>& s, half_t* xs) { return begin_rows(xs, s.x_row, s.m, s.k); }
template <class Row> DEV void finish_stage(const RowStage<Row>& s, half_t* xs, const StagedRows& rows) { finish_rows(xs, rows, s.m, s.k); }
// Rows that copy(xs) copies at once.
template <class Copy> struct WholeStage { const Copy& copy; };
template <class Copy> DEV u32 begin_stage(const WholeStage<Copy>&, half_t*) { return 0; }
template <class Copy> DEV void finish_stage(const WholeStage<Copy>& s, half_t* xs, u32) { s.copy(xs); }
#endif

// Computes the sums of all strips of the block and returns their address in shared memory, for gather().
// stage(xs), which is called after grid_wait(), copies the rows of x to shared memory. With warps of 64 lanes `stage` is a RowStage
// or a WholeStage, and the first weights are loaded between its two parts: loads complete in order, so that a wait for rows that were
// loaded after these weights would wait for the weights.
template <class Stage> DEV const float* strip_sums(const StripWeights& weights, u32 m, const Stage& stage) {
    DYN_SHARED(half_t, xs);
    const u32 warps = bdim() / WARP_SIZE, stride = x_stride(weights.k), chunks = (weights.k + CHUNK - 1) / CHUNK;
    float* sums = (float*)(xs + m * stride);
    const u32 mine = warp_id() < chunks ? (chunks - warp_id() + warps - 1) / warps : 0, items = mine * TILES;

#if WARP_SIZE == 64
    grid_wait();
    const auto begun = begin_stage(stage, xs);
#endif
    ChunkCursor to_load{0, warp_id()}, at{0, warp_id()};
    StripPieces ring[DEPTH];
    UNROLL for (u32 d = 0; d < DEPTH; ++d) {
        load_next(ring[d], weights, to_load, d < items);
        advance(to_load, warps, chunks);
    }
    grid_launch_dependents();
#if WARP_SIZE == 64
    finish_stage(stage, xs, begun);
#else
    grid_wait();
    stage(xs);
#endif
    sync();

    f32x4 c{{0.f, 0.f, 0.f, 0.f}};
#if WARP_SIZE == 64
    const auto multiply_next = [&](const StripPieces& strip) {
        multiply(c, strip, xs, m, stride, at.chunk);
        const u32 tile = at.tile;
        advance(at, warps, chunks);
        if (at.tile != tile) put_sums(c, sums, m, tile);
    };
    // No branch between the loads and their use: at the end of a branch the compiler for AMD does not know how
    // many loads are in flight, and waits for more of them than necessary.
    u32 i = 0;
    for (; i + DEPTH <= items; i += DEPTH) {
        UNROLL for (u32 d = 0; d < DEPTH; ++d) {
            multiply_next(ring[d]);
            load_next(ring[d], weights, to_load, i + d + DEPTH < items);
            advance(to_load, warps, chunks);
        }
    }
    UNROLL for (u32 d = 0; d < DEPTH - 1; ++d)
        if (i + d < items) multiply_next(ring[d]);
#else
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
#endif
    sync();
    return sums;
}

// Calls put(row, output, sum, up sum) for each output of the block, one output per thread. Without GATED the
// up sum is 0.
template <class Put> DEV void each_sum(const StripWeights& w, const float* sums, u32 m, const Put& put) {
    const u32 outputs = GATED ? w.n / 2 : w.n;
    for (u32 i = tid(); i < TILES * WIDTH * m; i += bdim()) {
        const u32 r = i % WIDTH, row = i / WIDTH % m, tile = i / WIDTH / m, out = w.first + tile * WIDTH + r;
        if (out >= outputs) continue;
        put(row, out, gather(sums, w.k, m, tile, row, r), GATED ? gather(sums, w.k, m, tile, row, r + WIDTH) : 0.f);
    }
}
