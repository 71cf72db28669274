// fp8_gemm_small_m/strips.h - product of up to 16 rows of x with strips of an fp8 W, for targets without bulk
// copies; a strip is STRIP_ROWS consecutive rows of W. Weights are loaded from global memory directly into
// registers. A block computes TILES strips over all of K; its warps process blocks of 128 columns (K) in
// turn. Weights are converted exactly to half_t in registers. The sum over 128 columns is multiplied by its
// scale when it is added to the sum of the warp. The sums of the warps are added in shared memory in
// ascending order of warps, so the order of additions depends only on K and the number of warps.
//
// Warps of 64 lanes have the loads of DEPTH blocks in flight, across strips, and start them before grid_wait(),
// because weights do not depend on the previous kernel. Warps of 32 lanes load one block ahead.
//
// Dynamic shared memory: M * (K rounded up to 128, + X_PADDING) * 2 + warps * TILES * STRIP_ROWS * M * 4 bytes.
#pragma once
#include "dev/normed_rows.h"
#include "dev/strip_fp8.h"

enum : u32 {
    BLOCK_K = 128,
    PIECES = BLOCK_K / (8 * WARP_SIZE / STRIP_ROWS),  // 8-byte loads per lane, strip and block of k
    DEPTH = 4,  // blocks of k in flight per warp of 64 lanes
    HALVES = GATED ? 2 : 1,
    WIDTH = STRIP_ROWS / HALVES,  // outputs per strip
    // Elements after each row of x in shared memory, which avoid bank conflicts between rows; 64 lanes: as KEY_PADDING
    // of attention/warp.h.
    X_PADDING = WARP_SIZE == 64 ? 16 : 32
};
static_assert(8 * WARP_SIZE / STRIP_ROWS == 32, "a strip is 32 k wide");

// The fp8 matrix W and its scales, and the index of the first output of the block.
struct ScaledFp8Weights {
    const fp8* w;
    const float* scales;
    u32 first, n, k;  // first output of the block; rows and columns of W
    u32 unit, scale_stride;
};

// Returns the index in W of row r of strip `tile` of the block. Rows beyond the last output repeat the row of
// the last output; their results are not stored.
DEV u64 weight_row(const ScaledFp8Weights& w, u32 tile, u32 r) {
    const u32 out = w.first + tile * WIDTH + r % WIDTH, outputs = w.n / HALVES;
    return (out < outputs ? out : outputs - 1) + (r < WIDTH ? 0 : outputs);
}

// fp8 weights that a lane has of one strip of W (STRIP_ROWS rows) over 128 columns (K), in vectors of 8
// columns, and their scale.
struct Fp8StripPieces { fp8x8 v[PIECES]; float scale; };

DEV Fp8StripPieces load_strip(const ScaledFp8Weights& w, u32 tile, u32 block) {
    const fp8* p = w.w + weight_row(w, tile, strip_w_row()) * w.k;
    Fp8StripPieces s;
    UNROLL for (u32 i = 0; i < PIECES; ++i) {
        const u32 k = block * BLOCK_K + i * 32 + strip_k();
#if WARP_SIZE == 64
        // No branch, because on AMD a branch ends with a wait for the load inside it. Columns past the last
        // one read the start of the row instead; they are multiplied by zeros of x.
        s.v[i] = load_stream((const fp8x8*)(p + (k < w.k ? k : 0)));
#else
        s.v[i] = k < w.k ? load_stream((const fp8x8*)(p + k)) : bits_as<fp8x8>(u64(0));
#endif
    }
    const u64 row = weight_row(w, tile, strip_c_w(0));  // All outputs of a lane have the same scale unit.
    s.scale = CHANNELS ? 1.f : w.scales[row / w.unit * w.scale_stride + block];
    return s;
}

// Row strides of x in shared memory: rows are zero-filled to a multiple of BLOCK_K.
DEV u32 padded(u32 k) { return (k + BLOCK_K - 1) / BLOCK_K * BLOCK_K; }
DEV u32 x_line(u32 k) { return padded(k) + X_PADDING; }

// Copies the rows of x to shared memory; with NORM they are normalised first. x_row(r) returns the address of
// row r.
template <class Row> DEV void stage_rows(half_t* xs, const Row& x_row, const half_t* norm, u32 m, u32 k, float eps) {
    for (u32 row = warp_id(); row < m; row += bdim() / WARP_SIZE) {
        const half_t* from = x_row(row);
        half_t* to = xs + row * x_line(k);
        if (NORM) copy_normed_row(to, from, norm, k, padded(k), row_inverse_rms(from, k, eps));
        else copy_row(to, from, k, padded(k));
    }
}

DEV void multiply(f32x4& c, const Fp8StripPieces& w, const half_t* xs, u32 m, u32 k, u32 block) {
    f32x4 part{{0.f, 0.f, 0.f, 0.f}};
    UNROLL for (u32 i = 0; i < PIECES; ++i) {
        StripOperandA x;
        UNROLL for (u32 j = 0; j < STRIP_X; ++j) {
            const u32 row = strip_x_row(j), at = block * BLOCK_K + i * 32 + strip_k();
#if WARP_SIZE == 64
            // Rows from m on read row 0 instead; their sums are not stored.
            x.v[j] = bits_as<half_x8>(load_piece(xs + (row < m ? row : 0) * x_line(k) + at));
#else
            x.v[j] = row < m ? *(const half_x8*)(xs + row * x_line(k) + at) : zero8();
#endif
        }
        strip_mma(part, x, widen_half(w.v[i]));
    }
    UNROLL for (u32 e = 0; e < 4; ++e) c.v[e] = fma_(part.v[e], w.scale, c.v[e]);
}

// Writes the sums `c` of this warp for strip `tile` to shared memory, and resets `c` to zero.
DEV void put_sums(f32x4& c, float* sums, u32 m, u32 tile) {
    UNROLL for (u32 e = 0; e < 4; ++e) {
        const u32 row = strip_c_x(e);
        if (row < m) sums[((warp_id() * TILES + tile) * m + row) * STRIP_ROWS + strip_c_w(e)] = c.v[e];
        c.v[e] = 0.f;
    }
}

#if WARP_SIZE == 64
// Iterates over the work of a warp: its blocks of 128 columns (K) of one strip, then its blocks of the next
// strip.
struct BlockCursor { u32 tile, block; };
DEV void advance(BlockCursor& at, u32 warps, u32 blocks) {
    at.block += warps;
    if (at.block < blocks) return;
    at.block = warp_id();
    ++at.tile;
}

// Loads of the weights of a warp, DEPTH blocks ahead.
struct Fp8StripRing {
    Fp8StripPieces strips[DEPTH];
    BlockCursor next;
};

// Loads the next weights into entry `d` of the ring. There is no branch: after the last block, the first
// columns of the last strip are loaded, and never used.
DEV void load_next(Fp8StripRing& ring, u32 d, const ScaledFp8Weights& w, u32 warps, u32 blocks) {
    const bool present = ring.next.tile < TILES && ring.next.block < blocks;
    ring.strips[d] = load_strip(w, present ? ring.next.tile : TILES - 1, present ? ring.next.block : 0);
    advance(ring.next, warps, blocks);
}

DEV Fp8StripRing first_loads(const ScaledFp8Weights& w, u32 warps, u32 blocks) {
    Fp8StripRing ring;
    ring.next = BlockCursor{0, warp_id()};
    UNROLL for (u32 d = 0; d < DEPTH; ++d) load_next(ring, d, w, warps, blocks);
    return ring;
}

// Multiplies the strips of the block by the rows of x, and writes the sums of this warp.
DEV void multiply_strips(Fp8StripRing& ring, const ScaledFp8Weights& w, const half_t* xs, float* sums, u32 m,
                         u32 warps, u32 blocks) {
    const u32 mine = warp_id() < blocks ? (blocks - warp_id() + warps - 1) / warps : 0, items = mine * TILES;
    BlockCursor at{0, warp_id()};
    f32x4 c{{0.f, 0.f, 0.f, 0.f}};
    const auto multiply_next = [&](const Fp8StripPieces& strip) {
        multiply(c, strip, xs, m, w.k, at.block);
        const u32 tile = at.tile;
        advance(at, warps, blocks);
        if (at.tile != tile) put_sums(c, sums, m, tile);
    };
    // No branch between the loads and their use: at the end of a branch the compiler does not know how many
    // loads are in flight, and waits for more of them than necessary.
    u32 i = 0;
    for (; i + DEPTH <= items; i += DEPTH) {
        UNROLL for (u32 d = 0; d < DEPTH; ++d) {
            multiply_next(ring.strips[d]);
            load_next(ring, d, w, warps, blocks);
        }
    }
    UNROLL for (u32 d = 0; d < DEPTH - 1; ++d)
        if (i + d < items) multiply_next(ring.strips[d]);
    for (u32 tile = 0; mine == 0 && tile < TILES; ++tile) put_sums(c, sums, m, tile);
}
#endif

// Computes the sums of all strips of the block and returns their address in shared memory, for gather().
// stage(xs), which is called after grid_wait(), copies the rows of x to shared memory.
template <class Stage> DEV const float* strip_sums(const ScaledFp8Weights& weights, u32 m, const Stage& stage) {
    DYN_SHARED(half_t, xs);
    const u32 warps = bdim() / WARP_SIZE, blocks = padded(weights.k) / BLOCK_K;
    float* sums = (float*)(xs + m * x_line(weights.k));
#if WARP_SIZE == 64
    Fp8StripRing ring = first_loads(weights, warps, blocks);
#endif
    grid_launch_dependents();
    grid_wait();
    stage(xs);
    sync();
#if WARP_SIZE == 64
    multiply_strips(ring, weights, xs, sums, m, warps, blocks);
#else
    for (u32 tile = 0; tile < TILES; ++tile) {
        f32x4 c{{0.f, 0.f, 0.f, 0.f}};
        Fp8StripPieces ahead = load_strip(weights, tile, warp_id() < blocks ? warp_id() : 0);
        for (u32 block = warp_id(); block < blocks; block += warps) {
            const Fp8StripPieces strip = ahead;
            if (block + warps < blocks) ahead = load_strip(weights, tile, block + warps);
            multiply(c, strip, xs, m, weights.k, block);
        }
        put_sums(c, sums, m, tile);
    }
#endif
    sync();
    return sums;
}

DEV float gather(const float* sums, u32 m_count, u32 tile, u32 m, u32 r) {
    const u32 at = (tile * m_count + m) * STRIP_ROWS + r, per_warp = TILES * m_count * STRIP_ROWS;
    float s = sums[at];
    for (u32 w = 1; w < bdim() / WARP_SIZE; ++w) s += sums[w * per_warp + at];
    return s;
}

// Calls put(row, output, sum, up sum) for each output of the block, one output per thread. Without GATED the
// up sum is 0.
template <class Put> DEV void each_sum(const ScaledFp8Weights& w, const float* sums, u32 m, const Put& put) {
    for (u32 i = tid(); i < TILES * WIDTH * m; i += bdim()) {
        const u32 r = i % WIDTH, row = i / WIDTH % m, tile = i / WIDTH / m, out = w.first + tile * WIDTH + r;
        if (out >= w.n / HALVES) continue;
        put(row, out, gather(sums, m, tile, row, r), GATED ? gather(sums, m, tile, row, r + WIDTH) : 0.f);
    }
}
