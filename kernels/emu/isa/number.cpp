// number.cpp - number formats of at most eight bits.
#include "number.h"

#include <algorithm>
#include <array>

namespace emu::isa {

float small_value(u32 bits, const MinifloatFormat& format) {
    const u32 mantissa_range = 1u << format.mantissa_bits, exponent_range = 1u << format.exponent_bits;
    const u32 mantissa = bits & (mantissa_range - 1), exponent = bits >> format.mantissa_bits & (exponent_range - 1);
    const bool negative = bits >> (format.bits() - 1) & 1;
    const bool top = exponent == exponent_range - 1;
    if (format.nan == MinifloatFormat::NEGATIVE_ZERO && negative && !exponent && !mantissa) return NAN;
    if (format.nan == MinifloatFormat::ALL_ONES && top && mantissa == mantissa_range - 1) return NAN;
    if (format.nan == MinifloatFormat::IEEE && top) return mantissa ? NAN : negative ? -INFINITY : INFINITY;
    const float fraction = (float)mantissa / (float)mantissa_range;
    const float size = exponent ? std::ldexp(1 + fraction, (int)exponent - format.bias)
                                : std::ldexp(fraction, 1 - format.bias);
    return negative ? -size : size;
}

static std::array<float, 256> table_of(const MinifloatFormat& format) {
    std::array<float, 256> values;
    for (u32 code = 0; code < 256; ++code) values[code] = small_value(code, format);
    return values;
}

const float* fp8_values(bool fnuz) {
    static const std::array<float, 256> ocp = table_of(FP8_OCP), other = table_of(FP8_FNUZ);
    return fnuz ? other.data() : ocp.data();
}

const float* bf8_values(bool fnuz) {
    static const std::array<float, 256> ocp = table_of(BF8_OCP), other = table_of(BF8_FNUZ);
    return fnuz ? other.data() : ocp.data();
}

u32 fp8_bits(float value, bool fnuz) {
    const u32 sign = as_bits(value) >> 24 & 0x80, nan = fnuz ? 0x80 : sign | 0x7f;
    const int bias = fnuz ? FP8_FNUZ.bias : FP8_OCP.bias;
    const float size = std::fabs(value), largest = fnuz ? 240.f : 448.f;
    if (value != value || std::isinf(value)) return nan;
    if (size == 0) return fnuz ? 0 : sign;
    // Subnormal numbers use the exponent of the smallest normal number.
    int exponent;
    std::frexp(size, &exponent);
    exponent = std::max(exponent - 1, 1 - bias);
    const float rounded = std::nearbyint(std::ldexp(size, 3 - exponent));
    if (std::ldexp(rounded, exponent - 3) > largest) return nan;
    const u32 code = ((u32)(exponent + bias - 1) << 3) + (u32)rounded;
    return fnuz && code == 0 ? 0 : sign | code;
}

}  // namespace emu::isa
