// settings.h - settings of the emulator, read once from the environment of the process. The comment of a
// setting gives its variable and default, then its meaning.
#pragma once
#include "lane.h"

namespace emu {

struct Settings {
    u64 seed;               // HIPEMU_SEED, 0: execution order of waves and lanes, see Order; settable by hipemuSetSeed
    u32 threads;            // HIPEMU_THREADS, number of cores: host threads for the blocks of a large launch
    u64 progress_timeout_ms; // HIPEMU_PROGRESS_TIMEOUT_MS, 10000: a launch fails if no block or barrier finishes for this time
    u32 wave;               // HIPEMU_WAVE, 64: wave size reported by the device; a kernel's own is its -DWARP_SIZE
    u32 gfx;                // HIPEMU_GFX, none: 90a, 942 or 950, the AMD architecture whose branches kernels use
    u32 devices;            // HIPEMU_DEVICES, 1: number of devices
    u64 memory_bytes;       // HIPEMU_MEMORY, 1 GiB: per device; suffixes K, M, G
    u64 graph_bytes;        // HIPEMU_GRAPH_BYTES, 0: device memory per instantiated graph; suffixes K, M, G
    int lazy;               // HIPEMU_LAZY, 0: 1 runs work only when a caller waits for it; 2 also interleaves streams
    const char* sanitize;   // HIPEMU_SANITIZE, none: address or thread, the sanitizer for compiled kernels
    const char* compiler;   // HIPEMU_CXX, c++: C++ compiler for kernels
    bool keep;              // HIPEMU_KEEP, off: keep the folders of compiled kernels
};

Settings& settings();

}  // namespace emu
