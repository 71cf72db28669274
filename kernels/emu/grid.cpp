// grid.cpp - runs the blocks of a launch of a kernel that was compiled for the host CPU.
#include <cstdio>

#include "grid_run.h"

namespace emu {

static std::mutex failure_lock;
static std::string failure;

const char* last_failure() { return failure.c_str(); }

void set_failure(const std::string& text) {
    fprintf(stderr, "hipemu: %s\n", text.c_str());
    std::lock_guard<std::mutex> guard(failure_lock);
    failure = text;
}

bool run(const Launch& launch, u32 wave, void (*entry)(void*), void* args, const char* name) {
    GridRun<Block> run(name, launch);
    const u64 blocks = (u64)launch.grid.x * launch.grid.y * launch.grid.z;
    const std::unique_ptr<ClusterBlockState[]> cluster_states(new ClusterBlockState[blocks]);
    const GridState grid{&launch, wave, entry, args, name, settings().seed, cluster_states.get(), &run.progress};
    run.begin = [&](Block& block, u64 index) { block.begin(grid, index); };
    return run.all(races_watched() ? 1 : settings().threads);  // Only races within a block are watched.
}

}  // namespace emu
