// workgroup.h - the waves of one workgroup, their LDS, and the order in which they run.
#pragma once
#include "../block.h"
#include "address_space.h"
#include "lds_races.h"
#include "wave.h"

namespace emu::isa {

// State shared by all workgroups of a launch.
struct LaunchState {
    const Kernel* kernel;
    const Launch* launch;
    const u8* arguments;        // kernel argument segment
    const u8* packet;           // dispatch packet
    const AddressSpace* memory;
    u64 seed;                   // seed % 4 is the Order (block.h)
    std::atomic<u64>* progress;
};

// A workgroup of an emulated launch: its waves and their LDS.
struct Workgroup {
    void begin(const LaunchState& state, u64 index);
    // Runs until all waves are done, until all waves wait for other workgroups to change memory, or for a
    // limited number of instructions.
    BlockOutcome run();
    void note_progress() { state->progress->fetch_add(1, std::memory_order_relaxed); }

    // Checks an LDS access of a wave and returns its host address.
    u8* lds_access(const Wave& w, u32 address, u32 bytes, LdsAccessKind access);
    // Checks a global memory access of `lane` and returns its host address.
    u8* global_access(u64 address, u32 bytes, u32 lane) {
        if (!last_range.contains(address, bytes)) find_range(address, bytes, lane);
        return (u8*)address;
    }

    std::string failure;
    PerformanceCounters counters;
    const LaunchState* state = nullptr;
    u32 lds_bytes = 0;

private:
    void begin_wave(Wave& w, u32 threads);
    void find_range(u64 address, u32 bytes, u32 lane);
    Wave* pick();
    u32 quantum();
    // Runs at most `instructions` instructions of a wave. Returns whether the wave is still ready to run.
    bool run_wave(Wave& w, u32 instructions);
    bool release_barrier();
    u64 random();

    Dim3 id{};
    ExecutionOrder order{};
    u64 rng = 0;
    u32 wave_count = 0, next_wave = 0;
    bool rotates = false;           // the last wave has had its turn without reaching a barrier or its end
    AddressRange last_range;
    std::vector<u8> lds;
    LdsRaceDetector races;
    std::vector<std::unique_ptr<Wave>> waves;
};

}  // namespace emu::isa
