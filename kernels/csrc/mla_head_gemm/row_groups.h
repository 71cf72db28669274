// mla_head_gemm/row_groups.h - the loop over groups of 16 rows of x with warps of 64 lanes. A group is multiplied
// from registers, into which each vector of a later group is loaded when its register is free: AHEAD groups
// are in flight. No load and no store depends on a branch, because on AMD a branch ends with a wait for the
// loads inside it: rows after the last one are the last one, and its outputs are stored again with the same
// values.
#pragma once
#include "dev/register_copy.h"

enum : u32 { AHEAD = PIECES >= 8 ? 1 : 12 / PIECES };  // groups in registers, of at least 8 loads

// Addresses and strides of x and y for one head, and the end of the rows of the block.
struct HeadRows {
    half_t* y;
    const half_t* x;
    u32 x_stride, y_stride, end;
};
DEV u32 token_of(const HeadRows& rows, u32 at) {
    const u32 token = at + (lane() & 15);
    return token < rows.end ? token : rows.end - 1;
}
DEV const half_t* inputs_of(const HeadRows& rows, u32 at) {
    return rows.x + (u64)token_of(rows, at) * rows.x_stride + strip_k();
}

// Stores outputs of a row of y. Lanes of rows after the last one store the same bits to the same address as the lane of
// the last row: GPUs store them once. Lanes are threads on the emulator, which therefore stores them atomically.
DEV void store_outputs(half_t* to, const half_x4& outputs) {
#if DEV_EMU
    __atomic_store_n((u64*)to, bits_as<u64>(outputs), __ATOMIC_RELAXED);
#else
    *(half_x4*)to = outputs;
#endif
}

// Multiplies the group at row `at` of x, whose vectors are in `group`, by the strips of this warp, and stores the
// outputs. LOADS: loads the vectors of the group at row `next` into the registers.
template <bool LOADS = true>
DEV void multiply_group(u32x4 (&group)[PIECES], const HeadRows& rows, const WeightStrips& own, u32 strip, u32 at, u32 next) {
    const half_t* from = inputs_of(rows, next);
    f32x4 sums[OWN];
    UNROLL for (u32 i = 0; i < OWN; ++i) sums[i] = f32x4{{0.f, 0.f, 0.f, 0.f}};
    UNROLL for (u32 k = 0; k < PIECES; ++k) {
#if DEV_GFX >= 0x950
        // Otherwise the compiler composes the operands, vectors of __bf16, anew at the end of each iteration, and waits there.
        group[k] = pinned(group[k]);
#endif
        // W is the first operand: a lane then has four successive outputs of a row.
        const half_x8 inputs = bits_as<half_x8>(group[k]);
        UNROLL for (u32 i = 0; i < OWN; ++i) strip_mma(sums[i], StripOperandA{{own.v[i][k]}}, inputs);
        if (LOADS) group[k] = load_piece(from + k * 32);
        keep_load_order();
    }
    half_t* to = rows.y + (u64)token_of(rows, at) * rows.y_stride + (lane() >> 4) * 4;
    UNROLL for (u32 i = 0; i < OWN; ++i) {
        half_x4 outputs;
        UNROLL for (u32 e = 0; e < 4; ++e) outputs.v[e] = to_half(sums[i].v[e]);
        if (STRIPS % OWN == 0 || strip + i < STRIPS) store_outputs(to + (strip + i) * STRIP_ROWS, outputs);
    }
}

// Groups in the registers of a warp. `at`: their first rows; from rows.end on: no group, and the registers have the
// last group again. `last`: the last group that has been loaded.
struct RowGroups {
    u32x4 piece[AHEAD][PIECES];
    u32 at[AHEAD], last;
};

// Multiplies all AHEAD groups, which exist, and replaces each by a later one. following(at) returns the group after that
// at row `at`; rows.end or more if there is none.
template <class Following>
DEV void multiply_all(RowGroups& groups, const HeadRows& rows, const WeightStrips& own, u32 strip, const Following& following) {
    UNROLL for (u32 d = 0; d < AHEAD; ++d) {
        const u32 at = groups.at[d], next = following(groups.last);
        groups.at[d] = next;
        groups.last = next < rows.end ? next : groups.last;
        multiply_group(groups.piece[d], rows, own, strip, at, groups.last);
    }
}

// Multiplies the groups from that at row `first` of x on.
template <class Following>
DEV void multiply_groups(const HeadRows& rows, const WeightStrips& own, u32 strip, u32 first, const Following& following) {
    if (first >= rows.end) return;
    RowGroups groups;
    groups.last = first;
    UNROLL for (u32 d = 0; d < AHEAD; ++d) {
        groups.at[d] = d == 0 ? first : following(groups.last);
        groups.last = groups.at[d] < rows.end ? groups.at[d] : groups.last;
        const half_t* from = inputs_of(rows, groups.last);
        UNROLL for (u32 k = 0; k < PIECES; ++k) {
            groups.piece[d][k] = load_piece(from + k * 32);
            keep_load_order();
        }
    }
    // Loads and stores complete in order, and a wait in the loop counts those that follow on every path to it. Therefore
    // the first groups, before which there are no stores, are multiplied before the loop, and no path without their stores
    // leads to the loop.
    if (groups.at[AHEAD - 1] < rows.end) {
        multiply_all(groups, rows, own, strip, following);
        while (groups.at[AHEAD - 1] < rows.end) multiply_all(groups, rows, own, strip, following);
    }
    UNROLL for (u32 d = 0; d + 1 < AHEAD; ++d)
        if (groups.at[d] < rows.end) multiply_group<false>(groups.piece[d], rows, own, strip, groups.at[d], 0);
}
