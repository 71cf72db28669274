// gemm_small_m/weights_mxfp4.h - MXFP4 weights of a strip (strips.h), decoded in registers. A lane loads one group of
// a row per chunk, 32 successive columns, so that its load has 16 bytes and it needs one scale. The vectors of eight
// columns of a lane are therefore successive, unlike those of weights_half.h; x is read in the same order.
#pragma once
#include "dev/mxfp4.h"

// Weights that a lane has of one strip of W over one chunk (128 columns of K): a group and its scale.
struct StripPieces { u32x4 group; u32 scale; };

// Returns the number of bytes of a matrix of n rows and k columns.
DEV u64 matrix_elements(u32 n, u32 k) { return (u64)n * mxfp4_row_bytes(k); }
// Returns the first column of vector `i` of this lane.
DEV u32 piece_column(u32 chunk, u32 i) { return chunk * CHUNK + strip_k() * PIECES + i * 8; }
DEV half_x8 weight_piece(const StripPieces& s, u32 i) { return decode_mxfp4(s.group.v[i], s.scale); }

// Columns past the last one read the first group of the row instead; they are multiplied by zeros of x.
DEV StripPieces load_strip(const StripWeights& w, u32 tile, u32 chunk) {
    const u8* row = w.w + weight_row(w, tile) * mxfp4_row_bytes(w.k);
    const u32 column = piece_column(chunk, 0), group = column < w.k ? column / MXFP4_GROUP : 0;
    return StripPieces{load_stream((const u32x4*)(row + group * MXFP4_GROUP_BYTES)), mxfp4_scales(row, w.k)[group]};
}
