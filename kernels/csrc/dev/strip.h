// dev/strip.h - MMA of 16 rows of x with a strip of W (STRIP_ROWS consecutive rows, 8 or 16), over 32
// elements of K at a time. Each register operand is a piece: a 16-byte vector of 8 elements that are
// consecutive along K in one row, as in global memory. The assignment of K indices to lanes may differ from
// that of the MMA instruction, as long as both operands use the same one. Therefore no shuffle and no shared
// memory is needed: weights, and the keys of attention, are loaded from global memory directly into MMA
// operand registers.
//
//   x pieces:  row strip_x_row(i), k strip_k()..+8        i < STRIP_X
//   w piece:   row strip_w_row(), k strip_k()..+8
//   c element: row strip_c_x(i) of x, row strip_c_w(i) of W,   i < 4
//
// An element of the result c is the same sum in the same order of additions, whatever the other rows of x and
// W contain.
#pragma once
#include "dev/gate.h"

#if WARP_SIZE == 64
enum : u32 { STRIP_ROWS = 16, STRIP_X = 1 };
DEV u32 strip_x_row(u32) { return lane() & 15; }
DEV u32 strip_w_row() { return lane() & 15; }
DEV u32 strip_k() { return (lane() >> 4) * 8; }
DEV u32 strip_c_x(u32 i) { return (lane() >> 4) * 4 + i; }
DEV u32 strip_c_w(u32) { return lane() & 15; }
#else
enum : u32 { STRIP_ROWS = 8, STRIP_X = 2 };
DEV u32 strip_x_row(u32 i) { return (lane() >> 2) + i * 8; }
DEV u32 strip_w_row() { return lane() >> 2; }
DEV u32 strip_k() { return (lane() & 3) * 8; }
DEV u32 strip_c_x(u32 i) { return (lane() >> 2) + (i >> 1) * 8; }
DEV u32 strip_c_w(u32 i) { return (lane() & 3) * 2 + (i & 1); }
#endif

// Operand A of strip_mma() in the registers of a lane: its pieces (vectors of 8 elements along K) of rows of
// x.
struct StripOperandA { half_x8 v[STRIP_X]; };

DEV half_x8 zero8() { return bits_as<half_x8>(u32x4{{0, 0, 0, 0}}); }

// Returns the activation of gate and up (dev/gate.h). Gate and up are rounded to half_t first, as if they had
// been stored between kernels.
DEV float gated(float gate, float up) {
    const float g = f32(to_half(gate));
    return activated(g) * up_factor(f32(to_half(up)));
}

#if DEV_NV
// One m16n8k16 MMA: c (16x8) += a (16x16) * b (16x8).
DEV void mma_half(f32x4& c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." HALF_PTX "." HALF_PTX ".f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(c.v[0]), "+f"(c.v[1]), "+f"(c.v[2]), "+f"(c.v[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEV void strip_mma(f32x4& c, const StripOperandA& x, const half_x8& w) {
    const u32x4 a = bits_as<u32x4>(x.v[0]), b = bits_as<u32x4>(x.v[1]), v = bits_as<u32x4>(w);
    mma_half(c, a.v[0], b.v[0], a.v[1], b.v[1], v.v[0], v.v[1]);
    mma_half(c, a.v[2], b.v[2], a.v[3], b.v[3], v.v[2], v.v[3]);
}
#elif DEV_AMD
DEV void strip_mma(f32x4& c, const StripOperandA& x, const half_x8& w) {
#  if DEV_GFX >= 0x950
    mfma_16x16x32(c, x.v[0], w);
#  else
    struct HalfX4Pair { half_x4 v[2]; };
    const HalfX4Pair a = bits_as<HalfX4Pair>(x.v[0]), b = bits_as<HalfX4Pair>(w);
    FragC sum = bits_as<FragC>(c);
    mma16(sum, bits_as<FragA>(a.v[0]), bits_as<FragB>(b.v[0]));
    mma16(sum, bits_as<FragA>(a.v[1]), bits_as<FragB>(b.v[1]));
    c = bits_as<f32x4>(sum);
#  endif
}
#else
// Layout of the operands and the result of strip_mma(): the element that each register of a lane has.
struct StripLayout {
    enum : u32 { NA = 8 * STRIP_X, NB = 8, NC = 4 };
    DEV u32 a_row(u32 i) { return strip_x_row(i / 8); }
    DEV u32 a_k(u32 i) { return strip_k() + i % 8; }
    DEV u32 b_k(u32 i) { return strip_k() + i; }
    DEV u32 b_col(u32) { return strip_w_row(); }
    DEV u32 c_row(u32 i) { return strip_c_x(i); }
    DEV u32 c_col(u32 i) { return strip_c_w(i); }
};
#  if WARP_SIZE == 32
struct MmaM16n8k16Layout {
    enum : u32 { NA = 8, NB = 4, NC = 4 };
    DEV u32 a_row(u32 i) { return (lane() >> 2) + (i >> 1 & 1) * 8; }
    DEV u32 a_k(u32 i) { return (lane() & 3) * 2 + (i & 1) + (i >> 2) * 8; }
    DEV u32 b_k(u32 i) { return (lane() & 3) * 2 + (i & 1) + (i >> 1) * 8; }
    DEV u32 b_col(u32) { return lane() >> 2; }
    DEV u32 c_row(u32 i) { return strip_c_x(i); }
    DEV u32 c_col(u32 i) { return strip_c_w(i); }
};
DEV void mma_half(f32x4& c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1 DEV_SITE) {
    const u32 a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
    half_t as[8], bs[4];
    for (u32 i = 0; i < 8; ++i) as[i].bits = (u16)(a[i / 2] >> (i % 2 * 16));
    for (u32 i = 0; i < 4; ++i) bs[i].bits = (u16)(b[i / 2] >> (i % 2 * 16));
    emu::tile_product<MmaM16n8k16Layout, 16, 8, 16>(c.v, as, bs DEV_AT);
}
#  endif
DEV void strip_mma(f32x4& c, const StripOperandA& x, const half_x8& w DEV_SITE) {
    emu::tile_product<StripLayout, 16, STRIP_ROWS, 32>(c.v, (const half_t*)&x, w.v DEV_AT);
}
#endif
