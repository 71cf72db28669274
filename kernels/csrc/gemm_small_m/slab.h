// gemm_small_m/slab.h - a warp's part of one slab: pieces of rows of x times the same pieces of rows of W,
// both in shared memory.
//
// The code has no branches, because a single warp per SM sub-partition cannot hide their latency: rows and
// strips out of range read valid addresses, and are masked to zero or discarded.
#pragma once

// Offsets of a lane's pieces of x, and masks that are zero for rows out of range.
struct XRowOffsets { u32 at[STRIP_X], mask[STRIP_X]; };
DEV XRowOffsets x_rows(u32 m, u32 line) {
    XRowOffsets x;
    UNROLL for (u32 j = 0; j < STRIP_X; ++j) {
        const u32 row = strip_x_row(j);
        x.at[j] = (row < m ? row : 0) * line + strip_k() * 2;
        x.mask[j] = row < m ? ~0u : 0u;
    }
    return x;
}

DEV StripOperandA x_piece(const u8* x, const XRowOffsets& rows) {
    StripOperandA piece;
    UNROLL for (u32 j = 0; j < STRIP_X; ++j) {
        u32x4 v = *(const u32x4*)(x + rows.at[j]);
        UNROLL for (u32 i = 0; i < 4; ++i) v.v[i] &= rows.mask[j];
        piece.v[j] = bits_as<half_x8>(v);
    }
    return piece;
}

// sums[t] += PIECES * 32 k of x times those of strip t. at[t]: offset in bytes from w to the lane's piece of
// that strip.
template <u32 PIECES, u32 STRIPS>
DEV void multiply_pieces(f32x4* sums, const u8* x, const XRowOffsets& rows, const u8* w, const u32* at) {
    StripOperandA pieces[PIECES];
    UNROLL for (u32 p = 0; p < PIECES; ++p) pieces[p] = x_piece(x + p * 64, rows);
    UNROLL for (u32 p = 0; p < PIECES; ++p)
        UNROLL for (u32 t = 0; t < STRIPS; ++t) strip_mma(sums[t], pieces[p], *(const half_x8*)(w + at[t] + p * 64));
}
