// pending.cpp - memory operations in flight.
#include "pending.h"

#include <algorithm>

namespace emu::isa {

static const u32 VECTOR_COUNTER_MAX = 63, LDS_COUNTER_MAX = 15;

void PendingRegisters::clear() {
    std::fill(pending, pending + REGISTERS, 0);
    for (u32 i = 0; i < 3; ++i) heads[i] = sizes[i] = 0;
    pending_count = lds_accesses = 0;
}

static std::string register_name(u32 number) {
    if (number < FIRST_ACCUMULATOR) return "v" + std::to_string(number);
    if (number < FIRST_SCALAR) return "a" + std::to_string(number - FIRST_ACCUMULATOR);
    if (number == FIRST_SCALAR + VCC) return "vcc";
    return "s" + std::to_string(number - FIRST_SCALAR);
}

static MemoryQueueKind queue_of(ExecutionUnit unit) {
    if (unit == ExecutionUnit::SCALAR_LOAD) return MemoryQueueKind::SCALAR;
    return unit == ExecutionUnit::LDS || unit == ExecutionUnit::LANES ? MemoryQueueKind::LDS : MemoryQueueKind::VECTOR;
}

static bool is_memory(ExecutionUnit unit) {
    return unit == ExecutionUnit::LOAD || unit == ExecutionUnit::ATOMIC || unit == ExecutionUnit::LDS || unit == ExecutionUnit::LANES;
}

// A register that an earlier load will write may be written by a second load of the same queue, because both
// loads complete in order.
void PendingRegisters::check_each(const Instruction& in) const {
    for (const RegisterRange& range : in.registers)
        for (u32 r = range.first; r < (u32)range.first + range.count; ++r) {
            if (!pending[r]) continue;
            if (range.is_destination && is_memory(in.unit) && queue_of(in.unit) == writer[r]) continue;
            const char* counter = writer[r] == MemoryQueueKind::VECTOR ? "vmcnt" : "lgkmcnt";
            fault(std::string(range.is_destination ? "writes " : "reads ") + register_name(r) +
                  ", which a load in flight will write: an s_waitcnt " + counter + " is missing or too weak");
        }
}

void PendingRegisters::add(MemoryQueueKind queue, const Instruction& in, bool has_result, bool touches_lds) {
    const u32 q = (u32)queue;
    // If the counter has reached its maximum, the instruction waits until the oldest operation is complete.
    if (queue == MemoryQueueKind::VECTOR && sizes[q] == VECTOR_COUNTER_MAX) complete_oldest(queue);
    if (queue == MemoryQueueKind::LDS && sizes[q] == LDS_COUNTER_MAX) complete_oldest(queue);
    if (sizes[q] == CAPACITY) complete_oldest(queue);
    MemoryOperation operation{{0, 0, true}, touches_lds};
    if (has_result)
        for (const RegisterRange& range : in.registers)
            if (range.is_destination) operation.result = range;
    for (u32 i = 0; i < operation.result.count; ++i) {
        const u32 r = operation.result.first + i;
        pending_count += pending[r]++ == 0;
        writer[r] = queue;
    }
    lds_accesses += touches_lds;
    operations[q][(heads[q] + sizes[q]++) % CAPACITY] = operation;
}

void PendingRegisters::complete_oldest(MemoryQueueKind queue) {
    const u32 q = (u32)queue;
    const MemoryOperation& operation = operations[q][heads[q]];
    heads[q] = (heads[q] + 1) % CAPACITY;
    --sizes[q];
    for (u32 i = 0; i < operation.result.count; ++i) pending_count -= --pending[operation.result.first + i] == 0;
    lds_accesses -= operation.touches_lds;
}

void PendingRegisters::wait(u32 vector_limit, u32 lds_limit) {
    while (vector_limit < VECTOR_COUNTER_MAX && in_flight(MemoryQueueKind::VECTOR) > vector_limit)
        complete_oldest(MemoryQueueKind::VECTOR);
    if (lds_limit >= LDS_COUNTER_MAX) return;
    while (in_flight(MemoryQueueKind::LDS) > lds_limit) complete_oldest(MemoryQueueKind::LDS);
    while (lds_limit == 0 && in_flight(MemoryQueueKind::SCALAR)) complete_oldest(MemoryQueueKind::SCALAR);
}

}  // namespace emu::isa
