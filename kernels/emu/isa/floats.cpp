// floats.cpp - operations on f32 and f16, and conversions with one 32-bit result. Denormals are kept, because
// clang enables them for kernels. Transcendental operations use the C library, which is more accurate than
// the hardware.
#include <algorithm>

#include "rules.h"

namespace emu::isa {

static float maximum(float x, float y) { return x != x ? y : y != y ? x : x > y ? x : y; }
static float minimum(float x, float y) { return x != x ? y : y != y ? x : x < y ? x : y; }
static float median(float x, float y, float z) {
    if (x != x || y != y || z != z) return minimum(minimum(x, y), z);
    return std::max(std::min(x, y), std::min(std::max(x, y), z));
}
static u32 to_unsigned(float value) { return !(value > 0) ? 0 : value >= 0x1p32f ? ~0u : (u32)value; }
static i32 to_signed(float value) {
    if (value != value) return 0;
    return value <= -0x1p31f ? INT32_MIN : value >= 0x1p31f ? INT32_MAX : (i32)value;
}
static i32 exponent(float value) {
    int result = 0;
    if (value != 0 && std::isfinite(value)) std::frexp(value, &result);
    return result;
}
static float mantissa(float value) {
    int ignored;
    return value == 0 || !std::isfinite(value) ? value : std::frexp(value, &ignored);
}
// Returns the class bits of a float, in the encoding of the v_cmp_class mask.
static u32 class_of(u32 bits) {
    const u32 exponent = bits >> 23 & 255, mantissa = bits & 0x7fffff;
    const bool negative = bits >> 31;
    if (exponent == 255 && mantissa) return mantissa >> 22 ? 2 : 1;
    if (exponent == 255) return negative ? 4 : 512;
    if (exponent) return negative ? 8 : 256;
    if (mantissa) return negative ? 16 : 128;
    return negative ? 32 : 64;
}

#define F(bits) as_float(bits)
#define H(bits) half_value((bits) & 0xffff)
static const LaneOperationEntry FLOATS[] = {
    ELEMENT("v_add_f32", as_bits(F(x) + F(y))), ELEMENT("v_sub_f32", as_bits(F(x) - F(y))),
    ELEMENT("v_subrev_f32", as_bits(F(y) - F(x))),
    ELEMENT("v_mul_f32", as_bits(F(x) * F(y))), ELEMENT("v_fma_f32", as_bits(std::fmaf(F(x), F(y), F(z)))),
    ELEMENT("v_fmac_f32", as_bits(std::fmaf(F(x), F(y), F(z)))),  // decode() adds the destination as third source
    ELEMENT("v_fmaak_f32", as_bits(std::fmaf(F(x), F(y), F(z)))),
    ELEMENT("v_fmamk_f32", as_bits(std::fmaf(F(x), F(y), F(z)))),
    ELEMENT("v_mul_legacy_f32", as_bits(F(x) == 0 || F(y) == 0 ? 0.f : F(x) * F(y))),
    ELEMENT("v_max_f32", as_bits(maximum(F(x), F(y)))), ELEMENT("v_min_f32", as_bits(minimum(F(x), F(y)))),
    ELEMENT("v_max3_f32", as_bits(maximum(maximum(F(x), F(y)), F(z)))),
    ELEMENT("v_min3_f32", as_bits(minimum(minimum(F(x), F(y)), F(z)))),
    ELEMENT("v_med3_f32", as_bits(median(F(x), F(y), F(z)))),
    ELEMENT("v_cvt_f32_u32", as_bits((float)x)), ELEMENT("v_cvt_f32_i32", as_bits((float)(i32)x)),
    ELEMENT("v_cvt_u32_f32", to_unsigned(F(x))), ELEMENT("v_cvt_i32_f32", to_signed(F(x))),
    ELEMENT("v_cvt_f32_ubyte0", as_bits((float)(x & 255))), ELEMENT("v_cvt_f32_ubyte1", as_bits((float)(x >> 8 & 255))),
    ELEMENT("v_cvt_f32_ubyte2", as_bits((float)(x >> 16 & 255))),
    ELEMENT("v_cvt_f32_ubyte3", as_bits((float)(x >> 24))),
    ELEMENT("v_cvt_f16_f32", half_bits(F(x))), ELEMENT("v_cvt_f32_bf16", x << 16),
    ELEMENT("v_cvt_pkrtz_f16_f32", half_bits_toward_zero(F(x)) | half_bits_toward_zero(F(y)) << 16),
    ELEMENT("v_cvt_pk_f16_f32", half_bits(F(x)) | half_bits(F(y)) << 16),
    ELEMENT("v_cvt_pk_bf16_f32", bf16_bits(F(x)) | bf16_bits(F(y)) << 16),
    ELEMENT("v_rndne_f32", as_bits(std::nearbyint(F(x)))), ELEMENT("v_floor_f32", as_bits(std::floor(F(x)))),
    ELEMENT("v_ceil_f32", as_bits(std::ceil(F(x)))), ELEMENT("v_trunc_f32", as_bits(std::trunc(F(x)))),
    ELEMENT("v_fract_f32", as_bits(F(x) - std::floor(F(x)))), ELEMENT("v_ldexp_f32", as_bits(std::ldexp(F(x), (i32)y))),
    ELEMENT("v_frexp_exp_i32_f32", exponent(F(x))), ELEMENT("v_frexp_mant_f32", as_bits(mantissa(F(x)))),
};
RuleList<LaneOperationEntry> float_elements() { return list_of(FLOATS); }

static const LaneOperationEntry TRANSCENDENTAL[] = {
    ELEMENT("v_exp_f32", as_bits(std::exp2(F(x)))), ELEMENT("v_log_f32", as_bits(std::log2(F(x)))),
    ELEMENT("v_rcp_f32", as_bits(1.f / F(x))), ELEMENT("v_rcp_iflag_f32", as_bits(1.f / F(x))),
    ELEMENT("v_rsq_f32", as_bits(1.f / std::sqrt(F(x)))), ELEMENT("v_sqrt_f32", as_bits(std::sqrt(F(x)))),
    ELEMENT("v_sin_f32", as_bits(std::sin(F(x) * 6.2831853f))),
    ELEMENT("v_cos_f32", as_bits(std::cos(F(x) * 6.2831853f))),
};
RuleList<LaneOperationEntry> transcendental_elements() { return list_of(TRANSCENDENTAL); }

// f16 operations; the upper half of the result is zero. Sums and products of two f16 values are computed in
// f32 and then rounded. f32 has more than twice the precision of f16, so the result equals that of a single
// rounding.
static const LaneOperationEntry HALVES[] = {
    ELEMENT("v_add_f16", half_bits(H(x) + H(y))), ELEMENT("v_sub_f16", half_bits(H(x) - H(y))),
    ELEMENT("v_subrev_f16", half_bits(H(y) - H(x))),
    ELEMENT("v_mul_f16", half_bits(H(x) * H(y))), ELEMENT("v_max_f16", half_bits(maximum(H(x), H(y)))),
    ELEMENT("v_min_f16", half_bits(minimum(H(x), H(y)))),
    ELEMENT("v_fma_f16", half_bits_of_double((double)H(x) * H(y) + H(z))),
    ELEMENT("v_fmac_f16", half_bits_of_double((double)H(x) * H(y) + H(z))),
    ELEMENT("v_max3_f16", half_bits(maximum(maximum(H(x), H(y)), H(z)))),
    ELEMENT("v_med3_f16", half_bits(median(H(x), H(y), H(z)))),
    ELEMENT("v_rcp_f16", half_bits(1.f / H(x))), ELEMENT("v_sqrt_f16", half_bits(std::sqrt(H(x)))),
    ELEMENT("v_cvt_f32_f16", as_bits(H(x))), ELEMENT("v_pack_b32_f16", (x & 0xffff) | y << 16),
};
RuleList<LaneOperationEntry> half_elements() { return list_of(HALVES); }
#undef F
#undef H

// ---- Comparisons

namespace {

// A condition code is a mask of the relations for which the comparison is true: less 1, equal 2, greater 4,
// unordered 8.
struct ConditionCode { const char* name; u32 mask; };
const ConditionCode RELATIONS[] = {{"lt", 1}, {"eq", 2}, {"le", 3}, {"gt", 4}, {"lg", 5}, {"ge", 6}, {"o", 7}, {"u", 8},
{"nge", 9},
                              {"nlg", 10}, {"ngt", 11}, {"nle", 12}, {"neq", 13}, {"nlt", 14}, {"ne", 5}};

void set_lanes(Wave& w, const Instruction& in, u64 mask) {
    mask &= w.exec;
    w.set_pair(in.operands[0].index, mask);
    if (in.name.compare(0, 6, "v_cmpx") == 0) w.set_exec(mask);
}

template <class T> u64 lanes_where(const T* a, const T* b, u32 relation) {
    const bool less = relation & 1, equal = relation & 2, greater = relation & 4, unordered = relation & 8;
    u64 mask = 0;
    for (u32 l = 0; l < LANES; ++l) {
        const bool holds = (less & (a[l] < b[l])) | (equal & (a[l] == b[l])) | (greater & (a[l] > b[l])) |
                           (unordered & ((a[l] != a[l]) | (b[l] != b[l])));
        mask |= (u64)holds << l;
    }
    return mask;
}

template <class T, T (*READ)(u32)> void compare(Wave& w, const Instruction& in) {
    u32 scratch[2][LANES], selected[LANES];
    T values[2][LANES];
    for (u32 i = 0; i < 2; ++i) {
        const Operand& o = in.operands[i + 1];
        if (in.is_16_bit && (o.absolute || o.negate || in.op_sel)) fault("modifiers of 16-bit comparisons are not supported");
        const u32* from = float_source(w, o, scratch[i]);
        if (in.is_sdwa) from = sub_dword_source(from, in.sub_dword.source[i], o.sign_extend, selected);
        for (u32 l = 0; l < LANES; ++l) values[i][l] = READ(from[l]);
    }
    set_lanes(w, in, lanes_where(values[0], values[1], in.relation));
}

template <class T> void compare_64(Wave& w, const Instruction& in) {
    T values[2][LANES];
    for (u32 i = 0; i < 2; ++i) {
        u32 scratch[2][LANES];
        const u32 *low = source(w, in.operands[i + 1], scratch[0]), *high = source(w, in.operands[i + 1], scratch[1], 1);
        for (u32 l = 0; l < LANES; ++l) values[i][l] = (T)join(low[l], high[l]);
    }
    set_lanes(w, in, lanes_where(values[0], values[1], in.relation));
}

void compare_class(Wave& w, const Instruction& in) {
    u32 scratch[2][LANES];
    const u32 *values = float_source(w, in.operands[1], scratch[0]), *classes = source(w, in.operands[2], scratch[1]);
    u64 mask = 0;
    for (u32 l = 0; l < LANES; ++l) mask |= (u64)((class_of(values[l]) & classes[l]) != 0) << l;
    set_lanes(w, in, mask);
}

u32 as_u32(u32 x) { return x; }
i32 as_i32(u32 x) { return (i32)x; }
u16 as_u16(u32 x) { return (u16)x; }
short as_i16(u32 x) { return (short)x; }
float as_f32(u32 x) { return as_float(x); }
float as_f16(u32 x) { return half_value(x & 0xffff); }
// Handler of the comparisons of one operand type.
struct CompareHandler { const char* type; Handler run; };
const CompareHandler COMPARISONS[] = {{"u32", compare<u32, as_u32>}, {"i32", compare<i32, as_i32>},
{"u16", compare<u16, as_u16>},
                                  {"i16", compare<short, as_i16>}, {"f32", compare<float, as_f32>},
                                  {"f16", compare<float, as_f16>},
                                  {"u64", compare_64<u64>}, {"i64", compare_64<i64>}};

}  // namespace

bool bind_comparison(Instruction& in) {
    const size_t prefix = in.name.compare(0, 7, "v_cmpx_") == 0 ? 7 : 6;
    if (prefix == 6 && in.name.compare(0, 6, "v_cmp_") != 0) return false;
    const size_t split = in.name.rfind('_');
    const std::string relation = in.name.substr(prefix, split - prefix), type = in.name.substr(split + 1);
    in.unit = ExecutionUnit::VECTOR;
    if (relation == "class" && type == "f32") {
        in.run = compare_class;
        return true;
    }
    for (const ConditionCode& r : RELATIONS)
        if (relation == r.name) in.relation = r.mask;
    for (const CompareHandler& c : COMPARISONS)
        if (in.relation && type == c.type) in.run = c.run;
    return true;
}

}  // namespace emu::isa
