// block.h - one thread block of an emulated launch: its threads, their execution order, and checks that
// threads use barriers and collectives correctly.
#pragma once
#include <atomic>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "lane.h"
#include "fiber.h"

namespace emu {

// State of a thread: ready, done, or waiting in a collective of its wave, at a block barrier or in pause().
enum class State : u8 { READY, AT_WAVE, AT_BLOCK, PAUSED, DONE };

// Order in which the emulator runs waves and lanes, as selected by the seed. A correct kernel gives correct
// results in every order.
enum class ExecutionOrder : u8 {
    FIRST_AHEAD,   // each wave runs as far as it can, the first wave first
    LAST_AHEAD,    // each wave runs as far as it can, the last wave and the last lane first
    ROUND_ROBIN,   // waves alternate at every collective
    RANDOM,        // waves and lanes in a random order, drawn again at every collective
};

// State of a block that is in a cluster: number of the block's threads that have called cluster_arrive(), and
// start of the block's dynamic shared memory.
struct ClusterBlockState { std::atomic<u32> arrived{0}; std::atomic<u8*> dynamic{nullptr}; };

// State shared by all blocks of a launch.
struct GridState {
    const Launch* launch;
    u32 wave;               // lanes per wave
    void (*entry)(void*);
    void* args;
    const char* name;
    u64 seed;               // seed % 4 is the ExecutionOrder; seeds >= 4 also shuffle lanes
    ClusterBlockState* cluster_states;  // one per block
    std::atomic<u64>* progress;  // number of block ends and barrier completions so far
};

struct Block;
// Execution state of a wave: states of its lanes, and the order in which they run.
struct WaveExecutionState : Wave {
    u32 first;              // index in the block of lane 0
    u32 site, arrived;      // source line of the current collective, and number of lanes waiting in it
    u32 position;           // index in `order` of the running lane
    u8 order[64];
    State states[64];       // by lane; contiguous, because collectives access all of them
};
// A thread of an emulated block. It runs on its own fiber.
struct EmulatedThread : ThreadContext {
    Block* block;
    Fiber fiber;
    bool started;
    u32 barriers;           // number of barriers reached
};

// Result of Block::run(): all threads are done, all remaining threads wait for other blocks, or a thread used
// a barrier or collective incorrectly.
enum class BlockOutcome { FINISHED, WAITING, RULE_VIOLATED };

// A thread block of an emulated launch: its threads, waves and shared memory.
struct Block {
    ~Block();
    // Starts block `index` of the grid, with its shared memory filled with NaN.
    void begin(const GridState& grid, u64 index);
    // Runs until all threads are done, or all remaining threads wait for other blocks, or a thread uses a
    // barrier or collective incorrectly.
    BlockOutcome run();

    void wave_sync(u32 site, Combine combine, WaveExchange& e);
    void block_sync();
    void pause();
    void note_progress() { grid.progress->fetch_add(1, std::memory_order_relaxed); }
    ClusterBlockState& cluster_state(u32 size, u32 rank);
    void* shared_array(const void* key, size_t bytes, size_t alignment);
    [[noreturn]] void rule_violated(const char* rule);
    void thread_main();

    std::string failure;

private:
    // Deleter that calls free().
    struct FreeDeleter { void operator()(void* p) const { free(p); } };
    // A static shared-memory array of the block.
    struct SharedArray { const void* key; size_t bytes; u8 *memory, *data; bool fresh; };

    void release_arrays();
    EmulatedThread& current() { return *static_cast<EmulatedThread*>(self); }
    WaveExecutionState& wave_of(EmulatedThread& t) { return *static_cast<WaveExecutionState*>(t.wave); }
    EmulatedThread* next_ready(WaveExecutionState& w, u32 from);
    void arm(EmulatedThread& t);
    void switch_to(EmulatedThread& me, EmulatedThread* next, bool ends);
    void wait(State state);
    void arrange(WaveExecutionState& w);
    bool shuffles() const { return order == ExecutionOrder::RANDOM || grid.seed >= 4; }
    WaveExecutionState* pick();
    void run_wave(WaveExecutionState& w);
    bool has(const WaveExecutionState& w, State state) const;
    bool release_barrier();
    bool wake();
    void report(const char* rule, u32 thread);
    u64 random();

    GridState grid{};
    Dim3 bid{};
    ExecutionOrder order{};
    u64 rng = 0;
    u32 count = 0, wave_count = 0, next_wave = 0;
    std::vector<EmulatedThread> threads;
    std::vector<std::unique_ptr<WaveExecutionState>> waves;
    std::vector<SharedArray> arrays;
    std::unique_ptr<u8, FreeDeleter> dynamic_memory;  // allocation of dynamic shared memory
    size_t dynamic_bytes = 0;
    char barrier_orders[2];
    Fiber host;
};

}  // namespace emu
