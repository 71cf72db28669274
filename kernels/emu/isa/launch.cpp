// launch.cpp - kernel arguments, the dispatch packet, and the run of a grid.
#include "launch.h"

#include <algorithm>

#include "../grid_run.h"
#include "../settings.h"
#include "workgroup.h"

namespace emu::isa {

Launch::KernelAttributes sizes_of(const Kernel& kernel) {
    Launch::KernelAttributes sizes{};
    for (const KernelArgument& a : kernel.arguments) {
        if (a.is_hidden()) continue;
        if (sizes.count == sizeof sizes.bytes / sizeof *sizes.bytes) fault("kernel " + kernel.name + " has too many arguments");
        sizes.bytes[sizes.count++] = a.bytes;
    }
    sizes.max_threads = kernel.max_threads;
    sizes.wave = LANES;
    return sizes;
}

// Value of a hidden argument, which the compiler appends to the arguments in the source.
static u32 hidden_value(const std::string& kind, const Launch& launch) {
    const u32 grid[3] = {launch.grid.x, launch.grid.y, launch.grid.z};
    const u32 axis = std::min<u32>((u32)(kind.back() - 'x'), 2);
    if (kind.compare(0, 18, "hidden_block_count") == 0) return grid[axis];
    if (kind.compare(0, 17, "hidden_group_size") == 0) return axis ? 1 : launch.threads;
    return 0;
}

static std::vector<u8> argument_segment(const Kernel& kernel, const Launch& launch) {
    std::vector<u8> segment(kernel.argument_bytes + 16);
    u32 given = 0;
    for (const KernelArgument& a : kernel.arguments) {
        if ((u64)a.offset + a.bytes > segment.size()) fault("an argument is outside of the argument segment");
        const u32 value = a.is_hidden() ? hidden_value(a.kind, launch) : 0;
        if (a.is_hidden()) memcpy(&segment[a.offset], &value, std::min(a.bytes, 4u));
        else memcpy(&segment[a.offset], launch.args[given++], a.bytes);
    }
    return segment;
}

// hsa_kernel_dispatch_packet_t: the workgroup size is at byte 4, the grid size in threads at byte 12.
struct DispatchPacket {
    u16 header, setup, workgroup[3], reserved;
    u32 grid[3];
    u32 rest[10];
};
static_assert(sizeof(DispatchPacket) == 64);

bool launch(const Kernel& kernel, const Launch& launch, AddressSpace memory) {
    const std::vector<u8> arguments = argument_segment(kernel, launch);
    const Dim3& grid = launch.grid;
    const DispatchPacket packet{0, 0, {(u16)launch.threads, 1, 1}, 0, {grid.x * launch.threads, grid.y, grid.z}, {}};
    memory.add(arguments.data(), arguments.size());
    memory.add(&packet, sizeof packet);
    memory.add(kernel.object->memory, kernel.object->bytes);
    memory.sort();
    GridRun<Workgroup> run(kernel.name, launch);
    const LaunchState state{&kernel, &launch, arguments.data(), (const u8*)&packet, &memory, settings().seed, &run.progress};
    PerformanceCounters counters;
    run.begin = [&](Workgroup& group, u64 index) { group.begin(state, index); };
    run.finish = [&](Workgroup& group) { counters.add(group.counters); };
    const bool good = run.all(settings().threads);
    add_counters(kernel.name, kernel.object->gfx, counters, {kernel.lds_bytes + launch.shared_bytes, launch.threads});
    return good;
}

}  // namespace emu::isa
