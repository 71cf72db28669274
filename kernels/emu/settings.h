// settings.h - how the emulator behaves; read once from the environment of the process.
#pragma once
#include "lane.h"

namespace emu {

struct Settings {
    u64 seed;               // HIPEMU_SEED, 0: order of waves and lanes, see Order; settable by hipemuSetSeed
    u32 threads;            // HIPEMU_THREADS, cores: host threads for the blocks of a large launch
    u64 patience_ms;        // HIPEMU_PATIENCE_MS, 10000: a launch in which no block and no barrier ends for so long is broken
    u32 wave;               // HIPEMU_WAVE, 64: what the device says of itself; a kernel's own is its -DWARP_SIZE
    u32 gfx;                // HIPEMU_GFX, none: 90a, 942 or 950; kernels are compiled for that branch
    u32 devices;            // HIPEMU_DEVICES, 1
    u64 memory_bytes;       // HIPEMU_MEMORY, 1 GiB: per device; suffixes K, M, G
    u64 graph_bytes;        // HIPEMU_GRAPH_BYTES, 0: device memory that a graph holds which is ready to run; suffixes K, M, G
    int lazy;               // HIPEMU_LAZY, 0: 1, work runs only when somebody waits for it; 2, in turn with other streams
    const char* sanitize;   // HIPEMU_SANITIZE, none: address or thread; kernels are compiled with it
    const char* compiler;   // HIPEMU_CXX, c++
    bool keep;              // HIPEMU_KEEP, off: do not delete the folders of compiled kernels
};

Settings& settings();

}  // namespace emu
