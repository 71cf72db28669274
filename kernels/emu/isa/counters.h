// counters.h - counters of the work that a kernel executed, summed over its waves and launches.
#pragma once
#include <string>

#include "instruction.h"

namespace emu::isa {

// Counters of executed instructions, waits and LDS cycles.
struct PerformanceCounters {
    u64 instructions[(u32)ExecutionUnit::COUNT] = {};
    u64 waves = 0, matrix_cycles = 0;
    // For each class of memory operations (vector memory; LDS and scalar loads): number of s_waitcnt
    // instructions that had to wait, and total number of operations in flight at these waits.
    u64 vector_waits = 0, vector_in_flight = 0, lds_waits = 0, lds_in_flight = 0;
    // Cycles of LDS accesses (lds_banks.h), and the cycles that the accesses would take without bank conflicts.
    u64 lds_cycles = 0, lds_ideal_cycles = 0;
    void add(const PerformanceCounters& other);
};

// Static and dynamic LDS of a workgroup in bytes, and its number of threads.
struct WorkgroupSize {
    u32 lds_bytes, threads;
    bool operator<(const WorkgroupSize& other) const {
        return lds_bytes != other.lds_bytes ? lds_bytes < other.lds_bytes : threads < other.threads;
    }
};

// Adds the counters of one launch to the counters of the process.
void add_counters(const std::string& kernel, u32 gfx, const PerformanceCounters& counters, const WorkgroupSize& size);
// Returns a tab-separated table of all kernels that ran, with a header line. The last column has the sizes of their
// workgroups, as "LDS bytes/threads" separated by spaces.
std::string counter_table();

}  // namespace emu::isa
