// pending.h - memory operations in flight, and the registers that they will write. s_waitcnt waits for
// operations to complete; the use of a register before that is reported as a missing s_waitcnt.
//
// Rules of gfx9: vector memory operations (counter vmcnt) complete in order; LDS operations complete in order
// among themselves; scalar loads complete in any order. LDS operations and scalar loads share the counter
// lgkmcnt, so a scalar load is known to be complete only when lgkmcnt is 0.
#pragma once
#include "instruction.h"

namespace emu::isa {

// Register numbers: vector 0-255, accumulator 256-511, scalar from 512.
const u32 FIRST_ACCUMULATOR = 256, FIRST_SCALAR = 512, REGISTERS = FIRST_SCALAR + SCALARS;

// Kind of memory operation; each kind has its own queue of operations in flight.
enum class MemoryQueueKind : u8 { VECTOR, LDS, SCALAR };

// Memory operations in flight, and the registers that they will write.
struct PendingRegisters {
    void clear();
    // Checks that no operation in flight will write a register that the next instruction uses.
    void check(const Instruction& in) const {
        if (pending_count) check_each(in);
    }
    // Adds an operation. If `has_result`, it will write the registers of `in` that are marked as
    // destinations.
    void add(MemoryQueueKind queue, const Instruction& in, bool has_result, bool touches_lds);
    void wait(u32 vector_limit, u32 lds_limit);
    u32 in_flight(MemoryQueueKind queue) const { return sizes[(u32)queue]; }
    // Whether LDS accesses are in flight, for which a barrier must wait.
    bool has_lds_access() const { return lds_accesses != 0; }

private:
    // A memory operation in flight.
    struct MemoryOperation {
        RegisterRange result;  // count 0: none
        bool touches_lds;
    };
    static const u32 CAPACITY = 64;  // the counters of the hardware are smaller

    void check_each(const Instruction& in) const;
    void complete_oldest(MemoryQueueKind queue);

    u8 pending[REGISTERS];           // number of operations that will write the register
    MemoryQueueKind writer[REGISTERS];   // of the last such operation
    MemoryOperation operations[3][CAPACITY];
    u32 heads[3], sizes[3];
    u32 pending_count, lds_accesses;
};

}  // namespace emu::isa
