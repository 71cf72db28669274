// mla_head_gemm: y[t, h] = W_h x[t, h], one matrix per head: W_UK absorbs queries into compressed KV space,
// W_UV expands attention outputs to values. CPU reference: the GEMMs in cpu/mla/absorbed_attention.rs.
//
//   y [tokens, y_stride], with head h from column h * OUTPUTS on; x [tokens, x_stride], with the INPUTS
//   columns of head h from column h * x_head on
//   w [heads][OUTPUTS][INPUTS]; all half_t, rows of x and W aligned to 16 bytes, rows of y to 8 bytes
//
//   -DINPUTS=n (a multiple of 32)  -DOUTPUTS=n (a multiple of 16)
//   -DLONG_ROW=n  tokens of rows with at least n tokens are skipped, except some at the ends of such rows;
//                 cu_q i32 [row_count + 1] delimits rows
//   rows  number of rows of x that a block processes, a multiple of 16
// Grid: (strips per head / strips per block, heads, tokens / rows). Block: 128. Rounding: the output once.
// The result of a row is the same sum in the same order of additions, whatever the other rows contain.
// Roofline: bytes of W; a warp keeps its strips of W in registers while it iterates over rows of x.
#include "dev.h"
#include "dev/strip.h"
#include "attention/row_of.h"

enum : u32 {
    PIECES = INPUTS / 32,
    STRIPS = OUTPUTS / STRIP_ROWS,
    OWN = PIECES >= 16 ? 1 : PIECES >= 8 ? 2 : 4,  // strips per warp
    WARPS = 128 / WARP_SIZE
};

// Weights in the registers of a lane, in vectors of 8 inputs, for the strips (STRIP_ROWS outputs each) of its
// warp.
struct WeightStrips { half_x8 v[OWN][PIECES]; };

DEV WeightStrips load_strips(const half_t* w, u32 first) {
    WeightStrips s;
    UNROLL for (u32 i = 0; i < OWN; ++i) {
        const half_t* row = w + ((first + i) * STRIP_ROWS + strip_w_row()) * INPUTS + strip_k();
        UNROLL for (u32 k = 0; k < PIECES; ++k)
            s.v[i][k] = first + i < STRIPS ? load_const((const half_x8*)(row + k * 32)) : zero8();
    }
    return s;
}

// Skips groups of 16 tokens that lie entirely in one long row. Returns the first of `at`, at + 16, at + 32,
// .. at which a group begins that must be computed; `end` or more if there is no such group.
DEV u32 skip_long_rows(const i32* cu_q, u32 row_count, u32 at, u32 end) {
#ifdef LONG_ROW
    while (at < end) {
        const u32 row = row_of(cu_q, row_count, at), row_end = (u32)load_scalar(cu_q + (row + 1));
        if (row_end < at + 16 || row_end - (u32)load_scalar(cu_q + row) < LONG_ROW) break;
        at += (row_end - at) / 16 * 16;
    }
#endif
    return at;
}

#if WARP_SIZE == 64
#  include "mla_head_gemm/row_groups.h"
#endif

KERNEL(128)
mla_head_gemm(half_t* y, const half_t* x, const half_t* w, const i32* cu_q, u32 row_count, u32 tokens, u32 rows, u32 x_head,
              u32 x_stride, u32 y_stride) {
    const u32 head = bid_y(), strip = (bid_x() * WARPS + warp_id()) * OWN;
    if (strip >= STRIPS) return;
    const WeightStrips own = load_strips(w + (u64)head * OUTPUTS * INPUTS, strip);
    grid_wait();
    grid_launch_dependents();
    const u32 end = (bid_z() + 1) * rows < tokens ? (bid_z() + 1) * rows : tokens;
#if WARP_SIZE == 64
    multiply_groups(HeadRows{y + head * OUTPUTS, x + head * x_head, x_stride, y_stride, end}, own, strip,
                    skip_long_rows(cu_q, row_count, bid_z() * rows, end),
                    [&](u32 at) { return skip_long_rows(cu_q, row_count, at + 16, end); });
#else
    for (u32 at = bid_z() * rows; (at = skip_long_rows(cu_q, row_count, at, end)) < end; at += 16) {
        f32x4 sums[OWN];
        UNROLL for (u32 i = 0; i < OWN; ++i) sums[i] = f32x4{{0.f, 0.f, 0.f, 0.f}};
        UNROLL for (u32 k = 0; k < PIECES; ++k) {
            StripOperandA part;
            UNROLL for (u32 j = 0; j < STRIP_X; ++j) {
                const u32 token = at + strip_x_row(j);
                const half_t* from = x + (u64)token * x_stride + head * x_head + k * 32 + strip_k();
                part.v[j] = token < end ? *(const half_x8*)from : zero8();
            }
            UNROLL for (u32 i = 0; i < OWN; ++i) strip_mma(sums[i], part, own.v[i][k]);
        }
        UNROLL for (u32 i = 0; i < OWN; ++i)
            UNROLL for (u32 e = 0; e < 4; ++e) {
                const u32 token = at + strip_c_x(e), output = (strip + i) * STRIP_ROWS + strip_c_w(e);
                if (token < end && output < OUTPUTS) y[(u64)token * y_stride + head * OUTPUTS + output] = to_half(sums[i].v[e]);
            }
    }
#endif
}
EXPORT(mla_head_gemm)
