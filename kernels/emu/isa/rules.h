// rules.h - tables that map instruction names to handlers. Each source file of instructions has one table.
#pragma once
#include "wave.h"

namespace emu::isa {

// Table entry of an instruction that computes one 32-bit result per lane.
struct LaneOperationEntry {
    const char* name;
    Element element;
};
// Table entry of an instruction: its name, handler and execution unit.
struct InstructionHandlerEntry {
    const char* name;
    Handler run;
    ExecutionUnit unit;
};
template <class Rule> struct RuleList {
    const Rule* first;
    size_t count;
    const Rule* begin() const { return first; }
    const Rule* end() const { return first + count; }
};
template <class Rule, size_t COUNT> RuleList<Rule> list_of(const Rule (&rules)[COUNT]) { return {rules, COUNT}; }

// Per-lane operations on up to three 32-bit sources, executed by run_element().
RuleList<LaneOperationEntry> integer_elements();
RuleList<LaneOperationEntry> float_elements();
RuleList<LaneOperationEntry> transcendental_elements();
RuleList<LaneOperationEntry> half_elements();
void run_element(Wave& w, const Instruction& in);

RuleList<InstructionHandlerEntry> wide_rules();         // carries, 64-bit integers
RuleList<InstructionHandlerEntry> lane_rules();         // moves between lanes and register files
RuleList<InstructionHandlerEntry> packed_rules();       // two results per lane
RuleList<InstructionHandlerEntry> conversion_rules();
RuleList<InstructionHandlerEntry> division_rules();
RuleList<InstructionHandlerEntry> scalar_rules();
RuleList<InstructionHandlerEntry> scalar_pair_rules();
RuleList<InstructionHandlerEntry> control_rules();
RuleList<InstructionHandlerEntry> global_rules();
RuleList<InstructionHandlerEntry> lds_rules();
RuleList<InstructionHandlerEntry> matrix_rules();
// Binds a comparison (v_cmp_*). Returns false if the instruction is not a comparison.
bool bind_comparison(Instruction& in);

// Defines a LaneOperationEntry. `result` is an expression of x, y and z, the 32-bit sources of a lane.
#define ELEMENT(name, result)                                                        \
    {name, [](const u32* xs, const u32* ys, const u32* zs, u32* __restrict results) { \
         for (u32 l = 0; l < LANES; ++l) {                                           \
             [[maybe_unused]] const u32 x = xs[l], y = ys[l], z = zs[l];             \
             results[l] = (u32)(result);                                             \
         }                                                                           \
     }}

// Defines an InstructionHandlerEntry. The statements can use the wave `w`, the instruction `in` and its
// operands `o`.
#define HANDLER(name, unit, ...)                                              \
    {name, []([[maybe_unused]] Wave& w, [[maybe_unused]] const Instruction& in) { \
         [[maybe_unused]] const Operand* const o = in.operands;               \
         __VA_ARGS__                                                          \
     }, ExecutionUnit::unit}

}  // namespace emu::isa
