// scalar_pairs.cpp - scalar operations on 64 bits and on the execution mask (EXEC).
#include "rules.h"

namespace emu::isa {

namespace {

#define PAIR_RULE(name, result, condition)                                                        \
    HANDLER(name, SCALAR, const u64 x = scalar_source_64(w, o[1]);                                \
            [[maybe_unused]] const u64 y = in.operand_count > 2 ? scalar_source_64(w, o[2]) : 0;   \
            [[maybe_unused]] const bool scc = w.scc; const u64 r = (u64)(result); w.scc = (condition); \
            w.set_pair(o[0].index, r);)
// Instructions that shift a 64-bit x by a 32-bit y.
#define SHIFT_RULE(name, result)                                                          \
    HANDLER(name, SCALAR, const u64 x = scalar_source_64(w, o[1]);                        \
            const u32 y = scalar_source(w, o[2]) & 63; const u64 r = (u64)(result);       \
            w.scc = r != 0; w.set_pair(o[0].index, r);)
// Instructions that count bits of a 64-bit x; the result is one 32-bit register.
#define COUNT_RULE(name, result, condition)                                                 \
    HANDLER(name, SCALAR, const u64 x = scalar_source_64(w, o[1]);                          \
            [[maybe_unused]] const bool scc = w.scc; const u32 r = (u32)(result);           \
            w.scc = (condition); w.set_scalar(o[0].index, r);)
// Instructions that save the execution mask in a register pair, and compute the new mask from the old mask
// and the source x.
#define SAVE_RULE(name, result)                                                          \
    HANDLER(name, SCALAR, const u64 x = scalar_source_64(w, o[1]), exec = w.exec;        \
            const u64 r = (u64)(result); w.set_pair(o[0].index, exec); w.set_exec(r); w.scc = r != 0;)

const InstructionHandlerEntry RULES[] = {
    PAIR_RULE("s_mov_b64", x, scc), PAIR_RULE("s_not_b64", ~x, r != 0), PAIR_RULE("s_and_b64", x & y, r != 0),
    PAIR_RULE("s_or_b64", x | y, r != 0), PAIR_RULE("s_xor_b64", x ^ y, r != 0),
    PAIR_RULE("s_andn2_b64", x & ~y, r != 0),
    PAIR_RULE("s_orn2_b64", x | ~y, r != 0), PAIR_RULE("s_nor_b64", ~(x | y), r != 0),
    PAIR_RULE("s_nand_b64", ~(x & y), r != 0),
    PAIR_RULE("s_xnor_b64", ~(x ^ y), r != 0), PAIR_RULE("s_cselect_b64", scc ? x : y, scc),
    SHIFT_RULE("s_lshl_b64", x << y), SHIFT_RULE("s_lshr_b64", x >> y), SHIFT_RULE("s_ashr_i64", (i64)x >> y),
    COUNT_RULE("s_bcnt1_i32_b64", __builtin_popcountll(x), r != 0),
    COUNT_RULE("s_ff1_i32_b64", x ? __builtin_ctzll(x) : -1, scc),
    COUNT_RULE("s_flbit_i32_b64", x ? __builtin_clzll(x) : -1, scc),
    SAVE_RULE("s_and_saveexec_b64", x & exec), SAVE_RULE("s_or_saveexec_b64", x | exec),
    SAVE_RULE("s_xor_saveexec_b64", x ^ exec),
    SAVE_RULE("s_andn2_saveexec_b64", x & ~exec), SAVE_RULE("s_orn2_saveexec_b64", x | ~exec),
    SAVE_RULE("s_andn1_saveexec_b64", ~x & exec), SAVE_RULE("s_orn1_saveexec_b64", ~x | exec),
    HANDLER("s_cmov_b64", SCALAR, if (w.scc) w.set_pair(o[0].index, scalar_source_64(w, o[1]));),
    HANDLER("s_bfe_u64", SCALAR, const u64 x = scalar_source_64(w, o[1]); const u32 field = scalar_source(w, o[2]);
            const u32 width = field >> 16 & 127; const u64 r = x >> (field & 63) & (width >= 64 ? ~0ull : (1ull << width) - 1);
            w.set_pair(o[0].index, r); w.scc = r != 0;),
};

}  // namespace

RuleList<InstructionHandlerEntry> scalar_pair_rules() { return list_of(RULES); }

}  // namespace emu::isa
