// wide.cpp - vector operations with carries, and vector operations on 64-bit integers.
#include "rules.h"

namespace emu::isa {

namespace {

// 64-bit source operand of an instruction, indexed by lane.
struct LaneSource64 {
    u32 scratch[2][LANES];
    const u32 *low, *high;
    LaneSource64(Wave& w, const Operand& o) : low(source(w, o, scratch[0])), high(source(w, o, scratch[1], 1)) {}
    u64 operator[](u32 l) const { return join(low[l], high[l]); }
};
// 32-bit source operand of an instruction, indexed by lane.
struct LaneSource32 {
    u32 scratch[LANES];
    const u32* values;
    LaneSource32(Wave& w, const Operand& o) : values(source(w, o, scratch)) {}
    u32 operator[](u32 l) const { return values[l]; }
};

void write_wide(Wave& w, const Operand& destination, const u64* result) {
    u32 words[2][LANES];
    for (u32 l = 0; l < LANES; ++l) {
        words[0][l] = (u32)result[l];
        words[1][l] = (u32)(result[l] >> 32);
    }
    for (u32 i = 0; i < 2; ++i) write_lanes(w, row(w, destination, i), words[i]);
}

template <class Operation> void wide(Wave& w, const Operand& destination, Operation operation) {
    u64 result[LANES];
    for (u32 l = 0; l < LANES; ++l) result[l] = operation(l);
    write_wide(w, destination, result);
}

// Addition x + y + carry, and subtraction x - y - carry (REVERSED: y - x - carry). Operands: result, carry
// out, x, y, and carry in if CARRY_IN.
enum class CarryOperation { ADD, SUBTRACT, SUBTRACT_REVERSED };
template <CarryOperation KIND, bool CARRY_IN> void with_carry(Wave& w, const Instruction& in) {
    const LaneSource32 a(w, in.operands[2]), b(w, in.operands[3]);
    const u64 carries = CARRY_IN ? w.pair(in.operands[4].index) : 0;
    u32 result[LANES];
    u64 out = 0;
    for (u32 l = 0; l < LANES; ++l) {
        const u64 carry = carries >> l & 1;
        const u64 x = KIND == CarryOperation::SUBTRACT_REVERSED ? b[l] : a[l], y = KIND == CarryOperation::SUBTRACT_REVERSED ? a[l] : b[l];
        const u64 sum = KIND == CarryOperation::ADD ? x + y + carry : x - y - carry;
        result[l] = (u32)sum;
        out |= (u64)(sum >> 32 != 0) << l;
    }
    const u64 mask = out & w.exec;
    write_lanes(w, row(w, in.operands[0]), result);
    w.set_pair(in.operands[1].index, mask);
}

void multiply_add_unsigned(Wave& w, const Instruction& in) {
    const LaneSource32 x(w, in.operands[2]), y(w, in.operands[3]);
    const LaneSource64 z(w, in.operands[4]);
    u64 result[LANES], carry = 0;
    for (u32 l = 0; l < LANES; ++l)
        carry |= (u64)__builtin_add_overflow((u64)x[l] * y[l], z[l], &result[l]) << l;
    write_wide(w, in.operands[0], result);
    w.set_pair(in.operands[1].index, carry & w.exec);
}

void multiply_add_signed(Wave& w, const Instruction& in) {
    const LaneSource32 x(w, in.operands[2]), y(w, in.operands[3]);
    const LaneSource64 z(w, in.operands[4]);
    u64 result[LANES], carry = 0;
    for (u32 l = 0; l < LANES; ++l) {
        i64 sum;
        carry |= (u64)__builtin_add_overflow((i64)(i32)x[l] * (i32)y[l], (i64)z[l], &sum) << l;
        result[l] = (u64)sum;
    }
    write_wide(w, in.operands[0], result);
    w.set_pair(in.operands[1].index, carry & w.exec);
}

const InstructionHandlerEntry RULES[] = {
    {"v_add_co_u32", with_carry<CarryOperation::ADD, false>, ExecutionUnit::VECTOR},
    {"v_addc_co_u32", with_carry<CarryOperation::ADD, true>, ExecutionUnit::VECTOR},
    {"v_sub_co_u32", with_carry<CarryOperation::SUBTRACT, false>, ExecutionUnit::VECTOR},
    {"v_subb_co_u32", with_carry<CarryOperation::SUBTRACT, true>, ExecutionUnit::VECTOR},
    {"v_subrev_co_u32", with_carry<CarryOperation::SUBTRACT_REVERSED, false>, ExecutionUnit::VECTOR},
    {"v_subbrev_co_u32", with_carry<CarryOperation::SUBTRACT_REVERSED, true>, ExecutionUnit::VECTOR},
    {"v_mad_u64_u32", multiply_add_unsigned, ExecutionUnit::VECTOR},
    {"v_mad_i64_i32", multiply_add_signed, ExecutionUnit::VECTOR},
    HANDLER("v_lshl_add_u64", VECTOR, const LaneSource64 x(w, o[1]), z(w, o[3]); const LaneSource32 y(w, o[2]);
            wide(w, o[0], [&](u32 l) { return (x[l] << (y[l] & 7)) + z[l]; });),
    HANDLER("v_lshlrev_b64", VECTOR, const LaneSource32 x(w, o[1]); const LaneSource64 y(w, o[2]);
            wide(w, o[0], [&](u32 l) { return y[l] << (x[l] & 63); });),
    HANDLER("v_lshrrev_b64", VECTOR, const LaneSource32 x(w, o[1]); const LaneSource64 y(w, o[2]);
            wide(w, o[0], [&](u32 l) { return y[l] >> (x[l] & 63); });),
    HANDLER("v_ashrrev_i64", VECTOR, const LaneSource32 x(w, o[1]); const LaneSource64 y(w, o[2]);
            wide(w, o[0], [&](u32 l) { return (u64)((i64)y[l] >> (x[l] & 63)); });),
    HANDLER("v_mov_b64", VECTOR, const LaneSource64 x(w, o[1]); wide(w, o[0], [&](u32 l) { return x[l]; });),
};

}  // namespace

RuleList<InstructionHandlerEntry> wide_rules() { return list_of(RULES); }

}  // namespace emu::isa
