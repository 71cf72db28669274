// settings.h - settings of the emulator, read once from environment variables of the process.
#pragma once
#include <vector>

#include "lane.h"

namespace emu {

// An AMD card that the emulated devices report as their model.
struct EmulatedCard {
    const char* name;       // value of HIPEMU_CARD
    const char* product;
    u32 gfx;
    int compute_units;
    u64 memory_bytes;
    bool integrated;        // GPU and host share one memory
};

// Kind of the links between the devices, with the numbers of hsa_amd_link_info_type_t.
enum class DeviceLink : u32 { NONE = 0, PCIE = 2, XGMI = 4 };

struct EmulatorSettings {
    // HIPEMU_SEED (default 0): execution order of waves and lanes (ExecutionOrder in block.h);
    // hipemuSetSeed() changes it.
    u64 seed;
    // HIPEMU_THREADS (default: number of cores): host threads that run the blocks of a large launch.
    u32 threads;
    // HIPEMU_PROGRESS_TIMEOUT_MS (default 10000): a launch fails if no block or barrier finishes within this
    // time.
    u64 progress_timeout_ms;
    // HIPEMU_WAVE (default 64): wave size that the device reports. Kernels use the value of -DWARP_SIZE
    // instead.
    u32 wave;
    // HIPEMU_CARD (default none): MI300X, MI300A, MI325X, MI350X or MI355X. The devices report the name,
    // architecture, compute units and memory of this card. Null: an unnamed card with few compute units.
    const EmulatedCard* card;
    // HIPEMU_GFX (default: that of the card, or none): 90a, 942 or 950, the AMD architecture for which
    // kernels are compiled, if they have code for specific architectures.
    u32 gfx;
    // HIPEMU_ISA (default none): gfx942 or gfx950. Kernels are compiled to machine code of this architecture,
    // and the machine code is emulated (isa/). HIPEMU_ISA also sets `gfx`; `wave` is 64. With HIPEMU_CARD,
    // the architecture is that of the card.
    u32 isa;
    // HIPEMU_CLANG (default clang-22): compiler for machine code. The version suffix also applies to
    // llvm-objdump and llvm-objcopy.
    const char* clang;
    // HIPEMU_COUNTERS (default none): file to which the counters of emulated machine code are appended at
    // process exit.
    const char* counters;
    // HIPEMU_DEVICES (default 8): number of devices. `devices` has the visible devices: ROCR_VISIBLE_DEVICES
    // selects from all devices, then HIP_VISIBLE_DEVICES (or else CUDA_VISIBLE_DEVICES) selects from the
    // remaining devices.
    std::vector<int> devices;
    // HIPEMU_PEER_ACCESS (default 1). 0: devices cannot access each other's memory.
    bool peer_access;
    // HIPEMU_LINK (default xgmi): xgmi, pcie or none, the link between any two devices. none: the runtime
    // reports no link.
    DeviceLink link;
    // HIPEMU_MEMORY (default: that of the card, or 1 GiB): memory per device; suffixes K, M, G.
    u64 memory_bytes;
    // HIPEMU_GRAPH_BYTES (default 0): device memory per instantiated graph; suffixes K, M, G.
    u64 graph_bytes;
    // HIPEMU_LAZY (default 0). 1: work runs only when a caller waits for it. 2: as 1, but the work of all
    // streams is interleaved.
    int lazy;
    // HIPEMU_SANITIZE (default none): `address` or `thread`, the sanitizer with which kernels are compiled.
    const char* sanitize;
    // HIPEMU_CXX (default c++): C++ compiler for kernels.
    const char* compiler;
    // HIPEMU_KEEP (default off): folders of compiled kernels are not deleted.
    bool keep;
};

EmulatorSettings& settings();

}  // namespace emu
