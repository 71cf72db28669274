// scalar.cpp - scalar operations on 32-bit integers. The arguments of SCALAR_RULE are expressions for the
// result r and for the new SCC, in terms of the sources x and y and the old SCC; the second expression may
// also contain r.
#include <algorithm>

#include "rules.h"

namespace emu::isa {

namespace {

u32 bit_field(u32 x, u32 field) {
    const u32 width = field >> 16 & 127;
    return x >> (field & 31) & (width >= 32 ? ~0u : (1u << width) - 1);
}
u32 signed_bit_field(u32 x, u32 field) {
    const u32 width = field >> 16 & 127;
    if (width == 0) return 0;
    return width >= 32 ? x >> (field & 31) : (u32)((i32)(x >> (field & 31) << (32 - width)) >> (32 - width));
}
u32 reverse(u32 x) {
    u32 result = 0;
    for (u32 i = 0; i < 32; ++i) result |= (x >> i & 1) << (31 - i);
    return result;
}
u32 absolute(u32 x) { return (i32)x < 0 ? 0 - x : x; }
bool add_overflows(u32 x, u32 y) {
    i32 ignored;
    return __builtin_add_overflow((i32)x, (i32)y, &ignored);
}
bool subtract_overflows(u32 x, u32 y) {
    i32 ignored;
    return __builtin_sub_overflow((i32)x, (i32)y, &ignored);
}
u32 signed_bits(u32 x) {
    const u32 flipped = (i32)x < 0 ? ~x : x;
    return flipped ? (u32)__builtin_clz(flipped) : ~0u;
}

#define SCALAR_RULE(name, result, condition)                                                 \
    HANDLER(name, SCALAR, const u32 x = scalar_source(w, o[1]);                              \
            [[maybe_unused]] const u32 y = in.operand_count > 2 ? scalar_source(w, o[2]) : 0; \
            [[maybe_unused]] const bool scc = w.scc; const u32 r = (u32)(result);            \
            w.scc = (condition); w.set_scalar(o[0].index, r);)
// Instructions that modify the scalar register x in place with a 16-bit immediate `k`.
#define IMMEDIATE_RULE(name, result, condition)                                             \
    HANDLER(name, SCALAR, [[maybe_unused]] const u32 x = w.scalar[o[0].index];              \
            const u32 k = (u32)(i32)(short)o[1].literal; [[maybe_unused]] const bool scc = w.scc; \
            w.scc = (condition); w.set_scalar(o[0].index, (u32)(result));)

const InstructionHandlerEntry RULES[] = {
    SCALAR_RULE("s_mov_b32", x, scc), SCALAR_RULE("s_not_b32", ~x, r != 0),
    SCALAR_RULE("s_and_b32", x & y, r != 0), SCALAR_RULE("s_or_b32", x | y, r != 0),
    SCALAR_RULE("s_xor_b32", x ^ y, r != 0),
    SCALAR_RULE("s_andn2_b32", x & ~y, r != 0), SCALAR_RULE("s_orn2_b32", x | ~y, r != 0),
    SCALAR_RULE("s_nor_b32", ~(x | y), r != 0),
    SCALAR_RULE("s_nand_b32", ~(x & y), r != 0), SCALAR_RULE("s_xnor_b32", ~(x ^ y), r != 0),
    SCALAR_RULE("s_add_u32", x + y, ((u64)x + y) >> 32), SCALAR_RULE("s_sub_u32", x - y, x < y),
    SCALAR_RULE("s_addc_u32", x + y + scc, ((u64)x + y + scc) >> 32),
    SCALAR_RULE("s_subb_u32", x - y - scc, (u64)y + scc > x),
    SCALAR_RULE("s_add_i32", x + y, add_overflows(x, y)), SCALAR_RULE("s_sub_i32", x - y, subtract_overflows(x, y)),
    SCALAR_RULE("s_mul_i32", x * y, scc), SCALAR_RULE("s_mul_hi_u32", (u64)x * y >> 32, scc),
    SCALAR_RULE("s_mul_hi_i32", (i64)(i32)x * (i32)y >> 32, scc),
    SCALAR_RULE("s_lshl_b32", x << (y & 31), r != 0), SCALAR_RULE("s_lshr_b32", x >> (y & 31), r != 0),
    SCALAR_RULE("s_ashr_i32", (i32)x >> (y & 31), r != 0),
    SCALAR_RULE("s_lshl1_add_u32", (x << 1) + y, (((u64)x << 1) + y) >> 32),
    SCALAR_RULE("s_lshl2_add_u32", (x << 2) + y, (((u64)x << 2) + y) >> 32),
    SCALAR_RULE("s_lshl3_add_u32", (x << 3) + y, (((u64)x << 3) + y) >> 32),
    SCALAR_RULE("s_lshl4_add_u32", (x << 4) + y, (((u64)x << 4) + y) >> 32),
    SCALAR_RULE("s_min_u32", std::min(x, y), x < y), SCALAR_RULE("s_max_u32", std::max(x, y), x > y),
    SCALAR_RULE("s_min_i32", std::min((i32)x, (i32)y), (i32)x < (i32)y),
    SCALAR_RULE("s_max_i32", std::max((i32)x, (i32)y), (i32)x > (i32)y),
    SCALAR_RULE("s_cselect_b32", scc ? x : y, scc), SCALAR_RULE("s_bfe_u32", bit_field(x, y), r != 0),
    SCALAR_RULE("s_bfe_i32", signed_bit_field(x, y), r != 0),
    SCALAR_RULE("s_bfm_b32", ((1u << (x & 31)) - 1) << (y & 31), scc),
    SCALAR_RULE("s_abs_i32", absolute(x), r != 0), SCALAR_RULE("s_absdiff_i32", absolute(x - y), r != 0),
    SCALAR_RULE("s_brev_b32", reverse(x), scc), SCALAR_RULE("s_ff1_i32_b32", x ? __builtin_ctz(x) : -1, scc),
    SCALAR_RULE("s_flbit_i32_b32", x ? __builtin_clz(x) : -1, scc), SCALAR_RULE("s_flbit_i32", signed_bits(x), scc),
    SCALAR_RULE("s_bcnt1_i32_b32", __builtin_popcount(x), r != 0),
    SCALAR_RULE("s_sext_i32_i16", (i32)(short)x, scc), SCALAR_RULE("s_sext_i32_i8", (i32)(signed char)x, scc),
    SCALAR_RULE("s_pack_ll_b32_b16", (x & 0xffff) | y << 16, scc),
    SCALAR_RULE("s_pack_lh_b32_b16", (x & 0xffff) | (y & 0xffff0000), scc),
    SCALAR_RULE("s_pack_hh_b32_b16", x >> 16 | (y & 0xffff0000), scc),
    HANDLER("s_cmov_b32", SCALAR, if (w.scc) w.set_scalar(o[0].index, scalar_source(w, o[1]));),
    HANDLER("s_bitset1_b32", SCALAR, w.set_scalar(o[0].index, w.scalar[o[0].index] | 1u << (scalar_source(w, o[1]) & 31));),
    HANDLER("s_bitset0_b32", SCALAR, w.set_scalar(o[0].index, w.scalar[o[0].index] & ~(1u << (scalar_source(w, o[1]) & 31)));),
    IMMEDIATE_RULE("s_movk_i32", k, scc), IMMEDIATE_RULE("s_addk_i32", x + k, add_overflows(x, k)),
    IMMEDIATE_RULE("s_mulk_i32", x * k, scc), IMMEDIATE_RULE("s_cmovk_i32", scc ? k : x, scc),
};

}  // namespace

RuleList<InstructionHandlerEntry> scalar_rules() { return list_of(RULES); }

}  // namespace emu::isa
