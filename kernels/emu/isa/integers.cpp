// integers.cpp - operations on 32-bit and 16-bit integers.
#include <algorithm>

#include "rules.h"

namespace emu::isa {

static i32 signed_24(u32 x) { return (i32)(x << 8) >> 8; }
static u32 unsigned_24(u32 x) { return x & 0xffffff; }
static u32 reverse(u32 x) {
    u32 result = 0;
    for (u32 i = 0; i < 32; ++i) result |= (x >> i & 1) << (31 - i);
    return result;
}
static u32 median(u32 x, u32 y, u32 z) { return std::max(std::min(x, y), std::min(std::max(x, y), z)); }
static i32 signed_median(i32 x, i32 y, i32 z) { return std::max(std::min(x, y), std::min(std::max(x, y), z)); }
static u32 bit_field(u32 x, u32 offset, u32 width) { return x >> (offset & 31) & ((1u << (width & 31)) - 1); }
static i32 signed_bit_field(u32 x, u32 offset, u32 width) {
    width &= 31;
    return width ? (i32)(x >> (offset & 31) << (32 - width)) >> (32 - width) : 0;
}
// Selects four bytes of {high, low}. Selectors 8-11 replicate a sign bit, 12 gives 0x00, 13 and above give
// 0xff.
static u32 permute_bytes(u32 high, u32 low, u32 selectors) {
    const u64 bytes = join(low, high);
    u32 result = 0;
    for (u32 i = 0; i < 4; ++i) {
        const u32 s = selectors >> 8 * i & 0xff;
        u32 byte = s == 12 ? 0 : 0xff;
        if (s < 8) byte = (u32)(bytes >> 8 * s) & 0xff;
        else if (s < 12) byte = bytes >> (16 * (s - 8) + 15) & 1 ? 0xff : 0;
        result |= byte << 8 * i;
    }
    return result;
}

static const LaneOperationEntry RULES[] = {
    ELEMENT("v_mov_b32", x), ELEMENT("v_not_b32", ~x), ELEMENT("v_bfrev_b32", reverse(x)),
    ELEMENT("v_and_b32", x & y), ELEMENT("v_or_b32", x | y), ELEMENT("v_xor_b32", x ^ y),
    ELEMENT("v_xnor_b32", ~(x ^ y)),
    ELEMENT("v_lshlrev_b32", y << (x & 31)), ELEMENT("v_lshrrev_b32", y >> (x & 31)),
    ELEMENT("v_ashrrev_i32", (i32)y >> (x & 31)),
    ELEMENT("v_add_u32", x + y), ELEMENT("v_sub_u32", x - y), ELEMENT("v_subrev_u32", y - x),
    ELEMENT("v_mul_lo_u32", x * y), ELEMENT("v_mul_hi_u32", (u64)x * y >> 32),
    ELEMENT("v_mul_hi_i32", (i64)(i32)x * (i32)y >> 32),
    ELEMENT("v_mul_u32_u24", unsigned_24(x) * unsigned_24(y)), ELEMENT("v_mul_i32_i24", signed_24(x) * signed_24(y)),
    ELEMENT("v_mul_hi_u32_u24", (u64)unsigned_24(x) * unsigned_24(y) >> 32),
    ELEMENT("v_mad_u32_u24", unsigned_24(x) * unsigned_24(y) + z),
    ELEMENT("v_mad_i32_i24", (u32)(signed_24(x) * signed_24(y)) + z),
    ELEMENT("v_max_u32", std::max(x, y)), ELEMENT("v_min_u32", std::min(x, y)),
    ELEMENT("v_max_i32", std::max((i32)x, (i32)y)), ELEMENT("v_min_i32", std::min((i32)x, (i32)y)),
    ELEMENT("v_max3_u32", std::max(std::max(x, y), z)), ELEMENT("v_min3_u32", std::min(std::min(x, y), z)),
    ELEMENT("v_max3_i32", std::max(std::max((i32)x, (i32)y), (i32)z)),
    ELEMENT("v_min3_i32", std::min(std::min((i32)x, (i32)y), (i32)z)),
    ELEMENT("v_med3_u32", median(x, y, z)), ELEMENT("v_med3_i32", signed_median((i32)x, (i32)y, (i32)z)),
    ELEMENT("v_lshl_add_u32", (x << (y & 31)) + z), ELEMENT("v_add_lshl_u32", (x + y) << (z & 31)),
    ELEMENT("v_lshl_or_b32", (x << (y & 31)) | z), ELEMENT("v_and_or_b32", (x & y) | z),
    ELEMENT("v_or3_b32", x | y | z),
    ELEMENT("v_add3_u32", x + y + z), ELEMENT("v_xad_u32", (x ^ y) + z),
    ELEMENT("v_bfe_u32", bit_field(x, y, z)), ELEMENT("v_bfe_i32", signed_bit_field(x, y, z)),
    ELEMENT("v_bfi_b32", (x & y) | (~x & z)), ELEMENT("v_bfm_b32", ((1u << (x & 31)) - 1) << (y & 31)),
    ELEMENT("v_perm_b32", permute_bytes(x, y, z)), ELEMENT("v_alignbit_b32", join(y, x) >> (z & 31)),
    ELEMENT("v_alignbyte_b32", join(y, x) >> 8 * (z & 3)), ELEMENT("v_bcnt_u32_b32", __builtin_popcount(x) + y),
    ELEMENT("v_ffbh_u32", x ? __builtin_clz(x) : ~0u), ELEMENT("v_ffbl_b32", x ? __builtin_ctz(x) : ~0u),
    ELEMENT("v_sad_u32", (x > y ? x - y : y - x) + z),
    // 16-bit integers: the upper half of the result is zero.
    ELEMENT("v_add_u16", (x + y) & 0xffff), ELEMENT("v_sub_u16", (x - y) & 0xffff),
    ELEMENT("v_subrev_u16", (y - x) & 0xffff),
    ELEMENT("v_mul_lo_u16", (x & 0xffff) * (y & 0xffff) & 0xffff), ELEMENT("v_lshlrev_b16", y << (x & 15) & 0xffff),
    ELEMENT("v_lshrrev_b16", (y & 0xffff) >> (x & 15)), ELEMENT("v_ashrrev_i16", (i32)(short)y >> (x & 15) & 0xffff),
    ELEMENT("v_max_u16", std::max(x & 0xffff, y & 0xffff)), ELEMENT("v_min_u16", std::min(x & 0xffff, y & 0xffff)),
    ELEMENT("v_max_i16", std::max((short)x, (short)y) & 0xffff),
    ELEMENT("v_min_i16", std::min((short)x, (short)y) & 0xffff),
    ELEMENT("v_mad_u32_u16", (x & 0xffff) * (y & 0xffff) + z),
    ELEMENT("v_mad_legacy_u16", ((x & 0xffff) * (y & 0xffff) + z) & 0xffff),
    ELEMENT("v_mad_u16", ((x & 0xffff) * (y & 0xffff) + z) & 0xffff),
    // Integer operations with the clamp modifier saturate; decode() appends `_clamp` to their names.
    ELEMENT("v_add_u32_clamp", x + y < x ? ~0u : x + y), ELEMENT("v_sub_u32_clamp", x < y ? 0 : x - y),
    ELEMENT("v_sub_u16_clamp", (x & 0xffff) < (y & 0xffff) ? 0 : (x - y) & 0xffff),
    ELEMENT("v_add_u16_clamp", std::min((x & 0xffff) + (y & 0xffff), 0xffffu)),
};
RuleList<LaneOperationEntry> integer_elements() { return list_of(RULES); }

}  // namespace emu::isa
