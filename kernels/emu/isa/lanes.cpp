// lanes.cpp - moves between lanes, moves between vector, accumulator and scalar registers, and selection by a
// mask.
#include <utility>

#include "rules.h"

namespace emu::isa {

namespace {

void select(Wave& w, const Instruction& in) {
    u32 scratch[2][LANES], selected[2][LANES], result[LANES];
    const u32* sources[2];
    for (u32 i = 0; i < 2; ++i) {
        sources[i] = float_source(w, in.operands[i + 1], scratch[i]);
        if (in.is_sdwa) sources[i] = sub_dword_source(sources[i], in.sub_dword.source[i], false, selected[i]);
    }
    if (in.is_dpp || (in.is_sdwa && in.sub_dword.destination != 6)) fault("v_cndmask_b32 with DPP or dst_sel is not supported");
    const u64 mask = w.pair(in.operands[3].index);
    for (u32 l = 0; l < LANES; ++l) result[l] = mask >> l & 1 ? sources[1][l] : sources[0][l];
    write_lanes(w, row(w, in.operands[0]), result);
}

// v_mbcnt: adds to a base the number of lower-numbered lanes whose bit in the mask is set. Bit 0 of the mask
// is lane FIRST.
template <u32 FIRST> void count_lower_lanes(Wave& w, const Instruction& in) {
    u32 scratch[2][LANES], result[LANES];
    const u32 *mask = source(w, in.operands[1], scratch[0]), *base = source(w, in.operands[2], scratch[1]);
    for (u32 l = 0; l < LANES; ++l) {
        const u32 below = l < FIRST ? 0 : l - FIRST >= 32 ? ~0u : (1u << (l - FIRST)) - 1;
        result[l] = base[l] + (u32)__builtin_popcount(mask[l] & below);
    }
    write_lanes(w, row(w, in.operands[0]), result);
}

void move(Wave& w, const Instruction& in) {
    u32 scratch[LANES], result[LANES];
    memcpy(result, source(w, in.operands[1], scratch), sizeof result);
    write_lanes(w, row(w, in.operands[0]), result);
}

void swap(Wave& w, const Instruction& in) {
    u32 *a = row(w, in.operands[0]), *b = row(w, in.operands[1]);
    for (u32 l = 0; l < LANES; ++l)
        if (w.active(l)) std::swap(a[l], b[l]);
}

void read_first_lane(Wave& w, const Instruction& in) {
    const u32 lane = w.exec ? (u32)__builtin_ctzll(w.exec) : 0;
    w.set_scalar(in.operands[0].index, row(w, in.operands[1])[lane]);
}

template <u32 BITS> void any_function_of_bits(Wave& w, const Instruction& in) {
    u32 scratch[3][LANES], result[LANES];
    const u32* s[3];
    for (u32 i = 0; i < 3; ++i) s[i] = source(w, in.operands[i + 1], scratch[i]);
    if (in.op_sel) fault("v_bitop3 with op_sel is not supported");
    for (u32 l = 0; l < LANES; ++l) {
        u32 bits = 0;
        for (u32 row = 0; row < 8; ++row)
            if (in.truth_table >> row & 1)
                bits |= (row & 4 ? s[0][l] : ~s[0][l]) & (row & 2 ? s[1][l] : ~s[1][l]) & (row & 1 ? s[2][l] : ~s[2][l]);
        result[l] = BITS == 16 ? bits & 0xffff : bits;
    }
    write_lanes(w, row(w, in.operands[0]), result);
}

// Swaps rows of 16 or 32 lanes between two registers, in all lanes, active or not (gfx950).
template <u32 WIDTH> void swap_rows(Wave& w, const Instruction& in) {
    u32 *a = row(w, in.operands[0]), *b = row(w, in.operands[1]);
    for (u32 l = 0; l < LANES; ++l)
        if (!(l & WIDTH)) std::swap(a[l + WIDTH], b[l]);
}

const InstructionHandlerEntry RULES[] = {
    {"v_cndmask_b32", select, ExecutionUnit::VECTOR},
    {"v_mbcnt_lo_u32_b32", count_lower_lanes<0>, ExecutionUnit::VECTOR},
    {"v_mbcnt_hi_u32_b32", count_lower_lanes<32>, ExecutionUnit::VECTOR},
    {"v_accvgpr_read_b32", move, ExecutionUnit::VECTOR},
    {"v_accvgpr_write_b32", move, ExecutionUnit::VECTOR},
    {"v_accvgpr_mov_b32", move, ExecutionUnit::VECTOR},
    {"v_swap_b32", swap, ExecutionUnit::VECTOR},
    {"v_readfirstlane_b32", read_first_lane, ExecutionUnit::VECTOR},
    HANDLER("v_readlane_b32", VECTOR, w.set_scalar(o[0].index, row(w, o[1])[scalar_source(w, o[2]) % LANES]);),
    HANDLER("v_writelane_b32", VECTOR, row(w, o[0])[scalar_source(w, o[2]) % LANES] = scalar_source(w, o[1]);),
    {"v_bitop3_b32", any_function_of_bits<32>, ExecutionUnit::VECTOR},
    {"v_bitop3_b16", any_function_of_bits<16>, ExecutionUnit::VECTOR},
    {"v_permlane16_swap_b32", swap_rows<16>, ExecutionUnit::VECTOR},
    {"v_permlane32_swap_b32", swap_rows<32>, ExecutionUnit::VECTOR},
};

}  // namespace

RuleList<InstructionHandlerEntry> lane_rules() { return list_of(RULES); }

}  // namespace emu::isa
