// lane.h - interface between the emulator and the code of a thread of an emulated block: state of the thread
// and its wave, and functions for synchronisation.
#pragma once
#include <cstddef>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

#pragma GCC visibility push(default)
namespace emu {

// Size of a grid in blocks, or position of a block in it.
struct Dim3 { u32 x, y, z; };

// One launch, as passed to EXPORT's entry point. If `sizes` is set, nothing runs: the entry point only
// reports the size of each argument in bytes, the maximum threads per block, and the lanes per wave.
struct Launch {
    Dim3 grid;
    u32 threads;        // number of threads per block
    u32 shared_bytes;   // dynamic shared memory per block
    void** args;        // one address per argument
    // Properties of a kernel: number of arguments and bytes of each, maximum threads per block, and lanes
    // per wave.
    struct KernelAttributes { u32 count, bytes[64], max_threads, wave; }* sizes;
};

// Data exchange between the lanes of a wave. Two buffers alternate, so that one synchronisation per
// collective is enough: before any lane writes a buffer again, all lanes have finished reading it.
struct WaveExchange {
    u64 word[64];
    alignas(64) float a[32 * 32], b[32 * 32], c[32 * 32];
};

// A wave, as accessible to the code of its lanes: two exchange buffers, and the number of lanes.
struct Wave {
    WaveExchange exchange[2];
    u32 lanes;          // lanes of this wave; fewer than WARP_SIZE in the last wave of a partial block
};

// State of the running thread, as visible to its code.
struct ThreadContext {
    u32 tid, lane;
    u32 buffer;         // which of the wave's two exchange buffers this lane uses next
    Wave* wave;
    const Dim3* bid;
    const Dim3* grid;
    u32 bdim;
    u8* dynamic;
    u32 dynamic_bytes;
};
extern __thread ThreadContext* self __attribute__((tls_model("initial-exec")));

typedef void (*Combine)(WaveExchange&);

// Waits for the other lanes of the wave at the collective in source line `site`. The last lane to arrive runs
// `combine` (if any) on the values of all lanes.
void wave_sync(u32 site, Combine combine, WaveExchange& e);
// Waits for the other threads of the block.
void block_sync();
// Suspends this thread, which waits for another thread to change memory, and runs other threads.
void pause();
// Resets the progress timeout. Called when a thread completes something that other threads of the launch wait
// for.
void note_progress();
// A cluster is `size` consecutive blocks along x. cluster_arrive: records that this thread has arrived, and
// that its block's dynamic shared memory starts at self->dynamic. cluster_wait: waits until every thread of
// all blocks of the cluster has arrived. After that, peer_dynamic returns the start of the dynamic shared
// memory of block `rank` of the cluster.
void cluster_arrive(u32 size);
void cluster_wait(u32 size);
u8* peer_dynamic(u32 size, u32 rank);
// Returns the block's static shared array with key `key`, filled with NaN at the start of the block. The
// array is aligned to `alignment`, but to at most 32 bytes, because device compilers guarantee no more.
void* shared_array(const void* key, size_t bytes, size_t alignment);
// Ends the launch with an error, because the running thread violated `rule`, such as a rule for barriers.
[[noreturn]] void rule_violated(const char* rule);
// Runs the grid. Returns false if a thread violated a rule; last_failure() describes it.
bool run(const Launch& launch, u32 wave, void (*entry)(void*), void* args, const char* name);
const char* last_failure();

inline WaveExchange& exchange() {
    ThreadContext& l = *self;
    return l.wave->exchange[l.buffer];
}
inline WaveExchange& wave_collective(u32 site, Combine combine) {
    WaveExchange& e = exchange();
    self->buffer ^= 1;
    wave_sync(site, combine, e);
    return e;
}

}  // namespace emu
#pragma GCC visibility pop
