// number.h - number formats of the instruction set, as functions of their bits.
#pragma once
#include <cmath>
#include <cstring>

#include "../lane.h"

namespace emu::isa {

const u32 LANES = 64;

inline float as_float(u32 bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
inline u32 as_bits(float value) {
    u32 bits;
    memcpy(&bits, &value, 4);
    return bits;
}
inline u64 join(u32 low, u32 high) { return low | (u64)high << 32; }

// f16 to f32. The multiplication corrects the exponent bias and is exact.
inline float half_value(u32 bits) {
    const u32 sign = (bits & 0x8000) << 16, size = bits & 0x7fff;
    const u32 finite = as_bits(as_float(size << 13) * 0x1p112f);
    return as_float(sign | (size >= 0x7c00 ? 0x7f800000 | (size & 0x3ff) << 13 : finite));
}
// f32 to f16, rounded to nearest even. The unit in the last place of 0.5 equals the smallest f16 subnormal,
// so adding 0.5 rounds subnormal results.
inline u32 half_bits(float value) {
    const u32 sign = as_bits(value) >> 16 & 0x8000, size = as_bits(value) & 0x7fffffff;
    if (size > 0x7f800000) return sign | 0x7e00;
    if (size >= 0x477ff000) return sign | 0x7c00;
    if (size < 0x38800000) return sign | (as_bits(as_float(size) + 0.5f) - 0x3f000000);
    return sign | (((size + 0xfff + (size >> 13 & 1)) >> 13) - (112 << 10));
}
// f32 to f16, rounded toward zero; finite numbers stay finite.
inline u32 half_bits_toward_zero(float value) {
    const u32 sign = as_bits(value) >> 16 & 0x8000, size = as_bits(value) & 0x7fffffff;
    if (size >= 0x7f800000) return half_bits(value);
    if (size >= 0x47800000) return sign | 0x7bff;
    if (size < 0x38800000) return sign | (u32)(as_float(size) * 0x1p24f);
    return sign | ((size >> 13) - (112 << 10));
}
// f64 to f16. The intermediate f32 is rounded to odd, so that the result equals that of a single rounding.
inline u32 half_bits_of_double(double value) {
    const float near = (float)value;
    if ((double)near == value || near != near) return half_bits(near);
    const u32 toward_zero = as_bits(near) - (std::fabs((double)near) > std::fabs(value) ? 1 : 0);
    return half_bits(as_float(toward_zero | 1));
}

inline float bf16_value(u32 bits) { return as_float(bits << 16); }
inline u32 bf16_bits(float value) {
    const u32 bits = as_bits(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return bits >> 16 | 64;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// A number format of at most eight bits. `nan`: which bit patterns are NaN.
struct MinifloatFormat {
    u32 exponent_bits, mantissa_bits;
    int bias;
    // Which bit patterns of a format are NaN.
    enum NanEncoding { NEVER, ALL_ONES, NEGATIVE_ZERO, IEEE } nan;
    u32 bits() const { return 1 + exponent_bits + mantissa_bits; }
};
const MinifloatFormat FP8_OCP{4, 3, 7, MinifloatFormat::ALL_ONES}, FP8_FNUZ{4, 3, 8, MinifloatFormat::NEGATIVE_ZERO};
const MinifloatFormat BF8_OCP{5, 2, 15, MinifloatFormat::IEEE}, BF8_FNUZ{5, 2, 16, MinifloatFormat::NEGATIVE_ZERO};
const MinifloatFormat FP6{2, 3, 1, MinifloatFormat::NEVER}, BF6{3, 2, 3, MinifloatFormat::NEVER}, FP4{2, 1, 1, MinifloatFormat::NEVER};

float small_value(u32 bits, const MinifloatFormat& format);
// Return the values of all 256 bit patterns of fp8 (e4m3) and bf8 (e5m2), in the FNUZ encoding if `fnuz`,
// else in the OCP encoding.
const float* fp8_values(bool fnuz);
const float* bf8_values(bool fnuz);
// f32 to fp8, rounded to nearest even; values above the largest fp8 value become NaN.
u32 fp8_bits(float value, bool fnuz);

}  // namespace emu::isa
