// address_space.h - global memory that a launch may access: allocations, kernel arguments, and constants of
// the code object.
#pragma once
#include <vector>

#include "number.h"

namespace emu::isa {

// A range of addresses that a launch may access; `end` is excluded.
struct AddressRange {
    u64 first = 0, end = 0;
    bool contains(u64 address, u64 bytes) const { return address >= first && address + bytes <= end; }
};

// All address ranges that a launch may access.
struct AddressSpace {
    std::vector<AddressRange> ranges;   // sorted
    // Whether the process has opened memory of other processes through IPC handles. In this case, accesses
    // outside the known ranges are allowed.
    bool has_foreign_memory = false;

    void add(const void* first, u64 bytes) { ranges.push_back({(u64)first, (u64)first + bytes}); }
    void sort();
    // Returns the range that contains [address, address + bytes), or null.
    const AddressRange* find(u64 address, u64 bytes) const;
};

}  // namespace emu::isa
