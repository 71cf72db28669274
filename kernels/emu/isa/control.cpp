// control.cpp - comparisons that set SCC, branches, waits and barriers.
#include "rules.h"
#include "workgroup.h"

namespace emu::isa {

namespace {

#define COMPARE_RULE(name, T, condition)                                                           \
    HANDLER(name, SCALAR, const T x = (T)scalar_source(w, o[0]), y = (T)scalar_source(w, o[1]); w.scc = (condition);)
// Comparison of a scalar register with a 16-bit immediate, the second source.
#define COMPARE_IMMEDIATE_RULE(name, T, IMMEDIATE, condition)                                     \
    HANDLER(name, SCALAR, const T x = (T)scalar_source(w, o[0]), y = (T)(IMMEDIATE)o[1].literal; w.scc = (condition);)
#define BRANCH_RULE(name, condition) HANDLER(name, BRANCH, if (condition) w.next = in.target;)

void wait(Wave& w, const Instruction& in) {
    const u32 vector = w.pending.in_flight(MemoryQueueKind::VECTOR);
    const u32 lds = w.pending.in_flight(MemoryQueueKind::LDS) + w.pending.in_flight(MemoryQueueKind::SCALAR);
    if (in.vector_limit < 63 && vector > in.vector_limit) {
        ++w.counters->vector_waits;
        w.counters->vector_in_flight += vector;
    }
    if (in.lds_limit < 15 && lds > in.lds_limit) {
        ++w.counters->lds_waits;
        w.counters->lds_in_flight += lds;
    }
    w.pending.wait(in.vector_limit, in.lds_limit);
}

void barrier(Wave& w, const Instruction&) {
    if (w.pending.has_lds_access()) fault("LDS accesses are in flight at the barrier: an s_waitcnt lgkmcnt is missing");
    w.state = WaveState::AT_BARRIER;
}

const InstructionHandlerEntry RULES[] = {
    COMPARE_RULE("s_cmp_lt_u32", u32, x < y), COMPARE_RULE("s_cmp_le_u32", u32, x <= y),
    COMPARE_RULE("s_cmp_gt_u32", u32, x > y),
    COMPARE_RULE("s_cmp_ge_u32", u32, x >= y), COMPARE_RULE("s_cmp_eq_u32", u32, x == y),
    COMPARE_RULE("s_cmp_lg_u32", u32, x != y),
    COMPARE_RULE("s_cmp_lt_i32", i32, x < y), COMPARE_RULE("s_cmp_le_i32", i32, x <= y),
    COMPARE_RULE("s_cmp_gt_i32", i32, x > y),
    COMPARE_RULE("s_cmp_ge_i32", i32, x >= y), COMPARE_RULE("s_cmp_eq_i32", i32, x == y),
    COMPARE_RULE("s_cmp_lg_i32", i32, x != y),
    COMPARE_RULE("s_bitcmp1_b32", u32, x >> (y & 31) & 1), COMPARE_RULE("s_bitcmp0_b32", u32, !(x >> (y & 31) & 1)),
    HANDLER("s_cmp_eq_u64", SCALAR, w.scc = scalar_source_64(w, o[0]) == scalar_source_64(w, o[1]);),
    HANDLER("s_cmp_lg_u64", SCALAR, w.scc = scalar_source_64(w, o[0]) != scalar_source_64(w, o[1]);),
    HANDLER("s_bitcmp1_b64", SCALAR, w.scc = scalar_source_64(w, o[0]) >> (scalar_source(w, o[1]) & 63) & 1;),
    HANDLER("s_bitcmp0_b64", SCALAR, w.scc = !(scalar_source_64(w, o[0]) >> (scalar_source(w, o[1]) & 63) & 1);),
    COMPARE_IMMEDIATE_RULE("s_cmpk_lt_u32", u32, u16, x < y), COMPARE_IMMEDIATE_RULE("s_cmpk_le_u32", u32, u16, x <= y),
    COMPARE_IMMEDIATE_RULE("s_cmpk_gt_u32", u32, u16, x > y), COMPARE_IMMEDIATE_RULE("s_cmpk_ge_u32", u32, u16, x >= y),
    COMPARE_IMMEDIATE_RULE("s_cmpk_eq_u32", u32, u16, x == y),
    COMPARE_IMMEDIATE_RULE("s_cmpk_lg_u32", u32, u16, x != y),
    COMPARE_IMMEDIATE_RULE("s_cmpk_lt_i32", i32, short, x < y),
    COMPARE_IMMEDIATE_RULE("s_cmpk_le_i32", i32, short, x <= y),
    COMPARE_IMMEDIATE_RULE("s_cmpk_gt_i32", i32, short, x > y),
    COMPARE_IMMEDIATE_RULE("s_cmpk_ge_i32", i32, short, x >= y),
    COMPARE_IMMEDIATE_RULE("s_cmpk_eq_i32", i32, short, x == y),
    COMPARE_IMMEDIATE_RULE("s_cmpk_lg_i32", i32, short, x != y),
    BRANCH_RULE("s_branch", true), BRANCH_RULE("s_cbranch_scc0", !w.scc), BRANCH_RULE("s_cbranch_scc1", w.scc),
    BRANCH_RULE("s_cbranch_vccz", w.pair(VCC) == 0), BRANCH_RULE("s_cbranch_vccnz", w.pair(VCC) != 0),
    BRANCH_RULE("s_cbranch_execz", w.exec == 0), BRANCH_RULE("s_cbranch_execnz", w.exec != 0),
    {"s_waitcnt", wait, ExecutionUnit::WAIT},
    {"s_barrier", barrier, ExecutionUnit::BARRIER},
    HANDLER("s_sleep", OTHER, w.state = WaveState::SLEEPING;),
    HANDLER("s_endpgm", OTHER, w.state = WaveState::DONE;),
    HANDLER("s_nop", OTHER, ), HANDLER("s_setprio", OTHER, ), HANDLER("s_setreg_imm32_b32", OTHER, ),
    // Caches are not emulated: every access goes to memory. A cache write-back counts as a vector memory
    // operation.
    HANDLER("buffer_wbl2", OTHER, w.pending.add(MemoryQueueKind::VECTOR, in, false, false);),
    HANDLER("buffer_inv", OTHER, ), HANDLER("s_dcache_inv", OTHER, ), HANDLER("s_icache_inv", OTHER, ),
};

}  // namespace

RuleList<InstructionHandlerEntry> control_rules() { return list_of(RULES); }

}  // namespace emu::isa
