// conversions.cpp - fp8 conversions, and the instructions of an IEEE division (v_div_scale, v_div_fixup). The
// fp8 format is FNUZ on gfx942 and OCP on gfx950.
#include "rules.h"

namespace emu::isa {

namespace {

// Returns the index of the byte of the source register that a conversion of one fp8 value reads, as selected
// by SDWA or op_sel.
u32 first_byte(const Instruction& in) {
    if (in.is_sdwa) return in.sub_dword.source[0] < 4 ? in.sub_dword.source[0] : in.sub_dword.source[0] == 5 ? 2 : 0;
    // On gfx950, op_sel [low, high] selects byte low * 2 + high.
    return (in.op_sel & 1 ? 2 : 0) + (in.op_sel & 2 ? 1 : 0);
}

template <const float* (*VALUES)(bool)> void widen_one(Wave& w, const Instruction& in) {
    const float* values = VALUES(w.fnuz());
    u32 scratch[LANES], result[LANES];
    const u32 *from = source(w, in.operands[1], scratch), shift = 8 * first_byte(in);
    for (u32 l = 0; l < LANES; ++l) result[l] = as_bits(values[from[l] >> shift & 0xff]);
    write_lanes(w, row(w, in.operands[0]), result);
}

template <const float* (*VALUES)(bool)> void widen_pair(Wave& w, const Instruction& in) {
    const float* values = VALUES(w.fnuz());
    u32 scratch[LANES], result[2][LANES];
    const u32* from = source(w, in.operands[1], scratch);
    const u32 shift = in.is_sdwa ? in.sub_dword.source[0] == 5 ? 16 : 0 : in.op_sel & 1 ? 16 : 0;
    for (u32 l = 0; l < LANES; ++l)
        for (u32 i = 0; i < 2; ++i) result[i][l] = as_bits(values[from[l] >> (shift + 8 * i) & 0xff]);
    for (u32 i = 0; i < 2; ++i) write_lanes(w, row(w, in.operands[0], i), result[i]);
}

// Converts two f32 numbers to fp8 and writes them to one half of the destination register.
void narrow_pair(Wave& w, const Instruction& in) {
    u32 scratch[2][LANES], result[LANES];
    const u32 *x = float_source(w, in.operands[1], scratch[0]), *y = float_source(w, in.operands[2], scratch[1]);
    u32* destination = row(w, in.operands[0]);
    const u32 shift = in.op_sel & 8 ? 16 : 0;
    for (u32 l = 0; l < LANES; ++l) {
        const u32 pair = fp8_bits(as_float(x[l]), w.fnuz()) | fp8_bits(as_float(y[l]), w.fnuz()) << 8;
        result[l] = (destination[l] & ~(0xffffu << shift)) | pair << shift;
    }
    write_lanes(w, destination, result);
}

const InstructionHandlerEntry CONVERSIONS[] = {
    {"v_cvt_f32_fp8", widen_one<fp8_values>, ExecutionUnit::VECTOR},
    {"v_cvt_f32_bf8", widen_one<bf8_values>, ExecutionUnit::VECTOR},
    {"v_cvt_pk_f32_fp8", widen_pair<fp8_values>, ExecutionUnit::VECTOR},
    {"v_cvt_pk_f32_bf8", widen_pair<bf8_values>, ExecutionUnit::VECTOR},
    {"v_cvt_pk_fp8_f32", narrow_pair, ExecutionUnit::VECTOR},
};

bool is_subnormal(float value) { return std::fpclassify(value) == FP_SUBNORMAL; }

// v_div_scale: scales the numerator or the denominator of a division, so that the instructions that follow
// neither overflow nor lose precision. Sets the VCC bit of each lane whose result v_div_fmas must scale back.
void scale_division(Wave& w, const Instruction& in) {
    u32 scratch[3][LANES], result[LANES];
    const u32* s[3];
    for (u32 i = 0; i < 3; ++i) s[i] = float_source(w, in.operands[i + 2], scratch[i]);
    u64 scaled = 0;
    for (u32 l = 0; l < LANES; ++l) {
        const float value = as_float(s[0][l]), denominator = as_float(s[1][l]), numerator = as_float(s[2][l]);
        const int e1 = s[1][l] >> 23 & 255, e2 = s[2][l] >> 23 & 255;
        const bool is_denominator = s[0][l] == s[1][l], is_numerator = s[0][l] == s[2][l];
        const bool tiny_reciprocal = is_subnormal(1.f / denominator), tiny_quotient = is_subnormal(numerator / denominator);
        float r = value;
        bool flag = false;
        if (denominator == 0 || numerator == 0) {
            r = NAN;
        } else if (e2 - e1 >= 96) {
            flag = true;
            if (is_denominator) r = std::ldexp(value, 64);
        } else if (e1 == 0) {
            r = std::ldexp(value, 64);
        } else if (tiny_reciprocal && tiny_quotient) {
            flag = true;
            if (is_denominator) r = std::ldexp(value, 64);
        } else if (tiny_reciprocal) {
            r = std::ldexp(value, -64);
        } else if (tiny_quotient) {
            flag = true;
            if (is_numerator) r = std::ldexp(value, 64);
        } else if (e2 <= 23) {
            r = std::ldexp(value, 64);
        }
        result[l] = as_bits(r);
        scaled |= (u64)flag << l;
    }
    const u64 mask = scaled & w.exec;
    write_lanes(w, row(w, in.operands[0]), result);
    w.set_pair(in.operands[1].index, mask);
}

void division_step(Wave& w, const Instruction& in) {
    u32 scratch[3][LANES], result[LANES];
    const u32* s[3];
    for (u32 i = 0; i < 3; ++i) s[i] = float_source(w, in.operands[i + 1], scratch[i]);
    const u64 scaled = w.pair(VCC);
    for (u32 l = 0; l < LANES; ++l) {
        float value = std::fmaf(as_float(s[0][l]), as_float(s[1][l]), as_float(s[2][l]));
        if (scaled >> l & 1) value = std::ldexp(value, (s[2][l] >> 23 & 255) > 127 ? 64 : -64);
        result[l] = as_bits(value);
    }
    write_lanes(w, row(w, in.operands[0]), result);
}

// Returns `quotient`, corrected for the special cases of an IEEE division.
u32 fix_quotient(u32 quotient, u32 denominator, u32 numerator) {
    const float d = as_float(denominator), n = as_float(numerator);
    const u32 sign = (denominator ^ numerator) & 0x80000000, infinity = 0x7f800000;
    if (n != n) return numerator | 0x400000;
    if (d != d) return denominator | 0x400000;
    if ((d == 0 && n == 0) || (std::isinf(d) && std::isinf(n))) return 0xffc00000;
    if (d == 0 || std::isinf(n)) return sign | infinity;
    if (std::isinf(d) || n == 0) return sign;
    if ((int)(numerator >> 23 & 255) - (int)(denominator >> 23 & 255) < -150) return sign;
    return sign | (quotient & 0x7fffffff);
}

void fix_division(Wave& w, const Instruction& in) {
    u32 scratch[3][LANES], result[LANES];
    const u32* s[3];
    for (u32 i = 0; i < 3; ++i) s[i] = float_source(w, in.operands[i + 1], scratch[i]);
    for (u32 l = 0; l < LANES; ++l) result[l] = fix_quotient(s[0][l], s[1][l], s[2][l]);
    write_lanes(w, row(w, in.operands[0]), result);
}

const InstructionHandlerEntry DIVISIONS[] = {
    {"v_div_scale_f32", scale_division, ExecutionUnit::VECTOR},
    {"v_div_fmas_f32", division_step, ExecutionUnit::VECTOR},
    {"v_div_fixup_f32", fix_division, ExecutionUnit::VECTOR},
};

}  // namespace

RuleList<InstructionHandlerEntry> conversion_rules() { return list_of(CONVERSIONS); }
RuleList<InstructionHandlerEntry> division_rules() { return list_of(DIVISIONS); }

}  // namespace emu::isa
