// gemm_small_m/slab.h - product over the columns (K) of a slab (ring-buffer stage) that one warp processes:
// rows of x times strips (STRIP_ROWS rows each) of W, both in shared memory.
//
// The code has no branches, because with a single warp per SM sub-partition their latency is not hidden.
// Instead, rows and strips out of range read valid addresses, and their values are masked to zero or their
// results discarded.
#pragma once

// Byte offsets of the rows of x that a lane reads, and masks that are zero for rows out of range.
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

// Adds to sums[t] the product of x and strip t of W (STRIP_ROWS rows) over PIECES * 32 columns (K). at[t]:
// byte offset from w to the first weights of strip t that this lane reads.
template <u32 PIECES, u32 STRIPS>
DEV void multiply_pieces(f32x4* sums, const u8* x, const XRowOffsets& rows, const u8* w, const u32* at) {
    StripOperandA pieces[PIECES];
    UNROLL for (u32 p = 0; p < PIECES; ++p) pieces[p] = x_piece(x + p * 64, rows);
    UNROLL for (u32 p = 0; p < PIECES; ++p)
        UNROLL for (u32 t = 0; t < STRIPS; ++t) strip_mma(sums[t], pieces[p], *(const half_x8*)(w + at[t] + p * 64));
}
