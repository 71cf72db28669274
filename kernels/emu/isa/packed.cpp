// packed.cpp - operations with two results per lane, in a register pair (f32) or in the halves of a register
// (16 bits), and f32 operations with f16 sources.
#include "rules.h"

namespace emu::isa {

namespace {

// Returns source operand `index` for one of the two results (`half` 0 or 1) of a packed f32 operation. op_sel
// selects the register of the source pair.
const u32* pair_source(Wave& w, const Instruction& in, u32 index, u32 half, u32* scratch) {
    const Operand& o = in.operands[index + 1];
    const u32 select = (half ? in.op_sel_hi : in.op_sel) >> index & 1;
    const u32* from = source(w, o, scratch, o.bank == OperandKind::LITERAL ? 0 : select);
    if (!((half ? in.neg_hi : in.neg_lo) >> index & 1)) return from;
    for (u32 l = 0; l < LANES; ++l) scratch[l] = from[l] ^ 0x80000000;
    return scratch;
}

template <u32 SOURCES, float (*OPERATION)(float, float, float)> void packed_f32(Wave& w, const Instruction& in) {
    u32 result[2][LANES];
    for (u32 half = 0; half < 2; ++half) {
        u32 scratch[3][LANES];
        const u32* s[3];
        for (u32 i = 0; i < 3; ++i) s[i] = i < SOURCES ? pair_source(w, in, i, half, scratch[i]) : s[0];
        for (u32 l = 0; l < LANES; ++l) result[half][l] = as_bits(OPERATION(as_float(s[0][l]), as_float(s[1][l]), as_float(s[2][l])));
    }
    for (u32 half = 0; half < 2; ++half) write_lanes(w, row(w, in.operands[0], half), result[half]);
}

// Writes to `bits` the 16 bits of source operand `index` for one of the two results (`half` 0 or 1). An
// inline float constant is stored as f32, and is converted to f16.
void half_sources(Wave& w, const Instruction& in, u32 index, u32 half, u32* bits) {
    const Operand& o = in.operands[index + 1];
    u32 scratch[LANES];
    const u32* from = source(w, o, scratch);
    const u32 select = (half ? in.op_sel_hi : in.op_sel) >> index & 1;
    const u32 flip = (half ? in.neg_hi : in.neg_lo) >> index & 1 ? 0x8000 : 0;
    for (u32 l = 0; l < LANES; ++l) {
        const u32 word = o.is_float ? half_bits(as_float(from[l])) : from[l] >> 16 * select;
        bits[l] = (word & 0xffff) ^ flip;
    }
}

template <u32 SOURCES, u32 (*OPERATION)(u32, u32, u32)> void packed_16(Wave& w, const Instruction& in) {
    u32 result[LANES] = {};
    for (u32 half = 0; half < 2; ++half) {
        u32 s[3][LANES] = {};
        for (u32 i = 0; i < SOURCES; ++i) half_sources(w, in, i, half, s[i]);
        for (u32 l = 0; l < LANES; ++l) result[l] |= (OPERATION(s[0][l], s[1][l], s[2][l]) & 0xffff) << 16 * half;
    }
    write_lanes(w, row(w, in.operands[0]), result);
}

// Fused multiply-add in f32. Each source is f32 or, if its op_sel_hi bit is set, the f16 in the register half
// that op_sel selects.
void mixed(Wave& w, const Instruction& in, u32* result) {
    float values[3][LANES];
    for (u32 i = 0; i < 3; ++i) {
        const Operand& o = in.operands[i + 1];
        u32 scratch[LANES];
        const u32* from = source(w, o, scratch);
        const bool is_half = in.op_sel_hi >> i & 1 && !o.is_float;
        const u32 shift = in.op_sel >> i & 1 ? 16 : 0;
        for (u32 l = 0; l < LANES; ++l) {
            float value = is_half ? half_value(from[l] >> shift & 0xffff) : as_float(from[l]);
            if (o.absolute) value = std::fabs(value);
            values[i][l] = o.negate ? -value : value;
        }
    }
    if (in.clamp) fault("v_fma_mix with clamp is not supported");
    for (u32 l = 0; l < LANES; ++l) result[l] = as_bits(std::fmaf(values[0][l], values[1][l], values[2][l]));
}

// Writes f16 results to one half of the destination; the other half keeps its value.
template <u32 SHIFT> void mixed_to_half(Wave& w, const Instruction& in) {
    u32 result[LANES];
    mixed(w, in, result);
    u32* destination = row(w, in.operands[0]);
    for (u32 l = 0; l < LANES; ++l)
        result[l] = (destination[l] & ~(0xffffu << SHIFT)) | half_bits(as_float(result[l])) << SHIFT;
    write_lanes(w, destination, result);
}

float product(float x, float y, float) { return x * y; }
float sum(float x, float y, float) { return x + y; }
float multiply_add(float x, float y, float z) { return std::fmaf(x, y, z); }
u32 sum_16(u32 x, u32 y, u32) { return half_bits(half_value(x) + half_value(y)); }
u32 product_16(u32 x, u32 y, u32) { return half_bits(half_value(x) * half_value(y)); }
u32 multiply_add_16(u32 x, u32 y, u32 z) { return half_bits_of_double((double)half_value(x) * half_value(y) + half_value(z)); }
u32 maximum_16(u32 x, u32 y, u32) { return half_value(x) > half_value(y) || half_value(y) != half_value(y) ? x : y; }
u32 minimum_16(u32 x, u32 y, u32) { return half_value(x) < half_value(y) || half_value(y) != half_value(y) ? x : y; }
u32 integer_sum_16(u32 x, u32 y, u32) { return x + y; }
u32 integer_difference_16(u32 x, u32 y, u32) { return x - y; }
u32 integer_product_16(u32 x, u32 y, u32) { return x * y; }
u32 integer_multiply_add_16(u32 x, u32 y, u32 z) { return x * y + z; }
u32 shift_left_16(u32 x, u32 y, u32) { return y << (x & 15); }
u32 shift_right_16(u32 x, u32 y, u32) { return y >> (x & 15); }
u32 integer_maximum_16(u32 x, u32 y, u32) { return x > y ? x : y; }
u32 integer_minimum_16(u32 x, u32 y, u32) { return x < y ? x : y; }

const InstructionHandlerEntry RULES[] = {
    {"v_pk_mul_f32", packed_f32<2, product>, ExecutionUnit::VECTOR},
    {"v_pk_add_f32", packed_f32<2, sum>, ExecutionUnit::VECTOR},
    {"v_pk_fma_f32", packed_f32<3, multiply_add>, ExecutionUnit::VECTOR},
    {"v_pk_add_f16", packed_16<2, sum_16>, ExecutionUnit::VECTOR},
    {"v_pk_mul_f16", packed_16<2, product_16>, ExecutionUnit::VECTOR},
    {"v_pk_fma_f16", packed_16<3, multiply_add_16>, ExecutionUnit::VECTOR},
    {"v_pk_max_f16", packed_16<2, maximum_16>, ExecutionUnit::VECTOR},
    {"v_pk_min_f16", packed_16<2, minimum_16>, ExecutionUnit::VECTOR},
    {"v_pk_add_u16", packed_16<2, integer_sum_16>, ExecutionUnit::VECTOR},
    {"v_pk_sub_u16", packed_16<2, integer_difference_16>, ExecutionUnit::VECTOR},
    {"v_pk_sub_i16", packed_16<2, integer_difference_16>, ExecutionUnit::VECTOR},
    {"v_pk_mul_lo_u16", packed_16<2, integer_product_16>, ExecutionUnit::VECTOR},
    {"v_pk_mad_u16", packed_16<3, integer_multiply_add_16>, ExecutionUnit::VECTOR},
    {"v_pk_lshlrev_b16", packed_16<2, shift_left_16>, ExecutionUnit::VECTOR},
    {"v_pk_lshrrev_b16", packed_16<2, shift_right_16>, ExecutionUnit::VECTOR},
    {"v_pk_max_u16", packed_16<2, integer_maximum_16>, ExecutionUnit::VECTOR},
    {"v_pk_min_u16", packed_16<2, integer_minimum_16>, ExecutionUnit::VECTOR},
    HANDLER("v_pk_mov_b32", VECTOR, u32 result[2][LANES];
            for (u32 half = 0; half < 2; ++half) {
                u32 scratch[LANES];
                const u32 select = o[1 + half].bank == OperandKind::LITERAL ? 0 : in.op_sel >> half & 1;
                memcpy(result[half], source(w, o[1 + half], scratch, select), sizeof result[half]);
            } for (u32 half = 0; half < 2; ++half) write_lanes(w, row(w, o[0], half), result[half]);),
    HANDLER("v_fma_mix_f32", VECTOR, u32 result[LANES]; mixed(w, in, result); write_lanes(w, row(w, o[0]), result);),
    {"v_fma_mixlo_f16", mixed_to_half<0>, ExecutionUnit::VECTOR},
    {"v_fma_mixhi_f16", mixed_to_half<16>, ExecutionUnit::VECTOR},
};

}  // namespace

RuleList<InstructionHandlerEntry> packed_rules() { return list_of(RULES); }

}  // namespace emu::isa
