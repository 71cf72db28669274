// lane.h - what a thread of an emulated block sees of the emulator: itself, its wave, and the ways to wait.
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

struct Dim { u32 x, y, z; };

// One launch as EXPORT's entry point receives it. With `sizes` set nothing runs: the entry point only says how many
// bytes each argument has, the threads its blocks may have, and the lanes of its waves.
struct Launch {
    Dim grid;
    u32 threads;        // per block
    u32 shared_bytes;   // dynamic
    void** args;        // one address per argument
    struct Sizes { u32 count, bytes[64], max_threads, wave; }* sizes;
};

// What the lanes of a wave lay down for each other. Two places used in turn, so that one meeting per collective is
// enough: by the time a lane writes the first place again, all have read it.
struct Exchange {
    u64 word[64];
    alignas(64) float a[32 * 32], b[32 * 32], c[32 * 32];
};

struct Wave {
    Exchange exchange[2];
    u32 lanes;          // of this wave; fewer than WARP_SIZE in the last wave of an odd block
};

// The thread that runs now, as its code sees it.
struct Lane {
    u32 tid, lane;
    u32 turn;           // which of the wave's two exchanges this lane uses next
    Wave* wave;
    const Dim* bid;
    const Dim* grid;
    u32 bdim;
    u8* dynamic;
    u32 dynamic_bytes;
};
extern __thread Lane* self __attribute__((tls_model("initial-exec")));

typedef void (*Combine)(Exchange&);

// Meets the other lanes of the wave at collective `site`; the last to come runs `combine` (if any) for all.
void meet_wave(u32 site, Combine combine, Exchange& e);
// Meets the other threads of the block.
void meet_block();
// Lets others run: this thread waits for memory to change.
void pause();
// What others of the launch wait for has come: their wait was not for nothing.
void moved();
// Clusters are runs of consecutive blocks along x. cluster_arrive: this thread of a block whose dynamic shared memory begins
// at self->dynamic is there. cluster_waits: until every thread of the `size` blocks around this one is. Behind that,
// peer_dynamic is where the dynamic shared memory of block `rank` of them begins.
void cluster_arrive(u32 size);
void cluster_wait(u32 size);
u8* peer_dynamic(u32 size, u32 rank);
// The block's static shared array known by `key`, filled with NaN when the block began. Aligned to `alignment`, at most 32
// bytes, and to no more: a compiler for a device promises no more either.
void* shared_array(const void* key, size_t bytes, size_t alignment);
// The thread broke a rule: ends the launch.
[[noreturn]] void broken(const char* rule);
// Runs the grid. Returns false if a thread broke a rule; last_failure() says which.
bool run(const Launch& launch, u32 wave, void (*entry)(void*), void* args, const char* name);
const char* last_failure();

inline Exchange& exchange() {
    Lane& l = *self;
    return l.wave->exchange[l.turn];
}
inline Exchange& meet(u32 site, Combine combine) {
    Exchange& e = exchange();
    self->turn ^= 1;
    meet_wave(site, combine, e);
    return e;
}

}  // namespace emu
#pragma GCC visibility pop
