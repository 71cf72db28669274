// bind.cpp - looks up the handler of an instruction by the instruction's name.
#include <unordered_map>

#include "rules.h"

namespace emu::isa {

namespace {

// What executes an instruction: its handler, its operation per lane (if it computes one 32-bit result per
// lane), and its execution unit.
struct InstructionBinding {
    Handler run;
    Element element;
    ExecutionUnit unit;
};

std::unordered_map<std::string, InstructionBinding> all_meanings() {
    std::unordered_map<std::string, InstructionBinding> all;
    for (const auto& rules : {integer_elements(), float_elements(), half_elements()})
        for (const LaneOperationEntry& rule : rules) all.emplace(rule.name, InstructionBinding{run_element, rule.element, ExecutionUnit::VECTOR});
    for (const LaneOperationEntry& rule : transcendental_elements())
        all.emplace(rule.name, InstructionBinding{run_element, rule.element, ExecutionUnit::TRANSCENDENTAL});
    for (const auto& rules : {wide_rules(), lane_rules(), packed_rules(), conversion_rules(), division_rules(), scalar_rules(),
                              scalar_pair_rules(), control_rules(), global_rules(), lds_rules(), matrix_rules()})
        for (const InstructionHandlerEntry& rule : rules) all.emplace(rule.name, InstructionBinding{rule.run, nullptr, rule.unit});
    return all;
}

}  // namespace

void bind(Instruction& in) {
    static const std::unordered_map<std::string, InstructionBinding> meanings = all_meanings();
    if (bind_comparison(in)) return;
    const auto found = meanings.find(in.name);
    if (found == meanings.end()) return;
    in.run = found->second.run;
    in.element = found->second.element;
    in.unit = found->second.unit;
}

}  // namespace emu::isa
