// gemm_small_m/weights_half.h - 16-bit weights of a strip (strips.h): vectors of eight columns, as in memory.
#pragma once

// Weights that a lane has of one strip of W over one chunk (128 columns of K), in vectors of 8 columns.
struct StripPieces { half_x8 v[PIECES]; };

// Returns the number of elements of a matrix of n rows and k columns.
DEV u64 matrix_elements(u32 n, u32 k) { return (u64)n * k; }
// Returns the first column of vector `i` of this lane.
DEV u32 piece_column(u32 chunk, u32 i) { return chunk * CHUNK + i * 32 + strip_k(); }
DEV half_x8 weight_piece(const StripPieces& s, u32 i) { return s.v[i]; }

DEV StripPieces load_strip(const StripWeights& w, u32 tile, u32 chunk) {
    const half_t* p = w.w + weight_row(w, tile) * w.k;
    StripPieces s;
    UNROLL for (u32 i = 0; i < PIECES; ++i) {
        const u32 k = piece_column(chunk, i);
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
