// gdn_chunk/columns.h - products whose result is the operand of the next product. A warp has 16 value columns; its matrices
// [16 columns x 16 keys or tokens] are the A operand (warps of 32 lanes) or the B operand (64 lanes) of an MMA whose result
// has the layout of that operand, so that rounding is the only step between two products.
//
//   warp 32: columns are the rows of the MMA, C^T = X^T T^T;   warp 64: columns are its columns, C = T X.
//
// Element i of a lane is column column_of(i), key or token index_of(i), in results and in operands.
#pragma once
#include "dev.h"

#if WARP_SIZE == 64
typedef FragB ColumnOperand;
typedef FragA TileOperand;
DEV u32 column_of(u32 i) { return FragLayout::c_col(i); }
DEV u32 index_of(u32 i) { return FragLayout::c_row(i); }
// Row and column of element i of a tile operand.
DEV u32 tile_row(u32 i) { return FragLayout::a_row(i); }
DEV u32 tile_column(u32 i) { return FragLayout::a_k(i); }
// Loads a tile, stored as rows.
DEV TileOperand load_tile(const half_t* tile, u32 stride) { return load_a(tile, stride); }
// Loads the transpose of a tile.
DEV TileOperand load_transposed(const half_t* tile, u32 stride) {
    TileOperand a;
    UNROLL for (u32 i = 0; i < FragLayout::NA; ++i) a.x[i] = tile[FragLayout::a_k(i) * stride + FragLayout::a_row(i)];
    return a;
}
DEV void multiply(FragC& c, const TileOperand& tile, const ColumnOperand& x) { mma16(c, tile, x); }
DEV FragB as_b(const ColumnOperand& x) { return x; }
DEV ColumnOperand as_columns(const FragB& b) { return b; }
// Operands of products of two tiles, left * right^T, whose result has the layout of an A operand.
typedef FragB LeftOperand;
typedef FragA RightOperand;
DEV LeftOperand load_left(const half_t* tile, u32 stride) { return load_b(tile, stride); }
DEV RightOperand load_right(const half_t* tile, u32 stride) { return load_a(tile, stride); }
DEV void multiply_tiles(FragC& c, const LeftOperand& left, const RightOperand& right) { mma16(c, right, left); }
#else
typedef FragA ColumnOperand;
typedef FragB TileOperand;
DEV u32 column_of(u32 i) { return FragLayout::c_row(i); }
DEV u32 index_of(u32 i) { return FragLayout::c_col(i); }
DEV u32 tile_row(u32 i) { return FragLayout::b_col(i); }
DEV u32 tile_column(u32 i) { return FragLayout::b_k(i); }
DEV TileOperand load_tile(const half_t* tile, u32 stride) { return load_b(tile, stride); }
DEV TileOperand load_transposed(const half_t* tile, u32 stride) { return load_b_trans(tile, stride); }
DEV void multiply(FragC& c, const TileOperand& tile, const ColumnOperand& x) { mma16(c, x, tile); }
// The A operand of X^T and the B operand of X have the same elements in a lane; two pairs are exchanged.
DEV FragB as_b(const ColumnOperand& x) {
    return {{x.x[0], x.x[1], x.x[4], x.x[5], x.x[2], x.x[3], x.x[6], x.x[7]}};
}
DEV ColumnOperand as_columns(const FragB& b) {
    return {{b.x[0], b.x[1], b.x[4], b.x[5], b.x[2], b.x[3], b.x[6], b.x[7]}};
}
typedef FragA LeftOperand;
typedef FragB RightOperand;
DEV LeftOperand load_left(const half_t* tile, u32 stride) { return load_a(tile, stride); }
DEV RightOperand load_right(const half_t* tile, u32 stride) { return load_b(tile, stride); }
DEV void multiply_tiles(FragC& c, const LeftOperand& left, const RightOperand& right) { mma16(c, left, right); }
#endif

// Loads 16 columns of 16 tokens, stored as rows of tokens.
DEV ColumnOperand load_columns(const half_t* tile, u32 stride) { return as_columns(load_b_trans(tile, stride)); }

// Rounds eight or four values to an operand.
template <class Operand> DEV Operand rounded(const FragC& c) {
    struct OperandWords { u32 v[FragLayout::NC / 2]; } w;
    UNROLL for (u32 i = 0; i < FragLayout::NC / 2; ++i) w.v[i] = pack_half(c.x[2 * i], c.x[2 * i + 1]);
    return bits_as<Operand>(w);
}
