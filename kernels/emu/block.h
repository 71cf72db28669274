// block.h - one block of a launch: its threads, their order, the rules they must keep.
#pragma once
#include <atomic>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "lane.h"
#include "fiber.h"

namespace emu {

enum class State : u8 { READY, AT_WAVE, AT_BLOCK, PAUSED, DONE };

// Who runs first. A kernel is right only if it is right in all of them.
enum class Order : u8 {
    FIRST_AHEAD,   // each wave as far as it can, the first before the others
    LAST_AHEAD,    // the same from the last wave and the last lane
    TURNS,         // waves take turns at every collective
    RANDOM,        // waves and lanes in random order, anew at every collective
};

// What a block lets the others of its cluster know: how many of its threads have come, and its memory.
struct Seat { std::atomic<u32> arrived{0}; std::atomic<u8*> dynamic{nullptr}; };

// What all blocks of a launch share.
struct Grid {
    const Launch* launch;
    u32 wave;               // lanes
    void (*entry)(void*);
    void* args;
    const char* name;
    u64 seed;               // seed % 4 is the Order; seeds from 4 on also shuffle lanes
    Seat* seats;            // of all blocks
    std::atomic<u64>* moves;  // ends of blocks and of barriers so far
};

struct Block;
struct WaveRun : Wave {
    u32 first;              // thread of lane 0
    u32 site, arrived;      // the collective under way, and lanes that wait in it
    u32 position;           // in `order`, of the lane that runs
    u8 order[64];
    State states[64];       // of its lanes, side by side: collectives read and write all of them
};
struct Thread : Lane {
    Block* block;
    Fiber fiber;
    bool started;
    u32 barriers;           // that it has come to
};

enum class Outcome { FINISHED, WAITING, BROKEN };

struct Block {
    ~Block();
    // Makes this the block `index` of the grid, with all its memory poisoned.
    void begin(const Grid& grid, u64 index);
    // Runs until all threads are done, or all that can run wait for other blocks, or one broke a rule.
    Outcome run();

    void meet_wave(u32 site, Combine combine, Exchange& e);
    void meet_block();
    void pause();
    void moved() { grid.moves->fetch_add(1, std::memory_order_relaxed); }
    Seat& seat(u32 size, u32 rank);
    void* shared_array(const void* key, size_t bytes, size_t alignment);
    [[noreturn]] void broken(const char* rule);
    void thread_main();

    std::string failure;

private:
    struct Free { void operator()(void* p) const { free(p); } };
    struct Array { const void* key; size_t bytes; u8 *memory, *data; bool fresh; };

    void drop_arrays();
    Thread& current() { return *static_cast<Thread*>(self); }
    WaveRun& wave_of(Thread& t) { return *static_cast<WaveRun*>(t.wave); }
    Thread* next_ready(WaveRun& w, u32 from);
    void arm(Thread& t);
    void leave(Thread& me, Thread* next, bool ends);
    void wait(State state);
    void arrange(WaveRun& w);
    bool shuffles() const { return order == Order::RANDOM || grid.seed >= 4; }
    WaveRun* pick();
    void run_wave(WaveRun& w);
    bool has(const WaveRun& w, State state) const;
    bool release_barrier();
    bool wake();
    void report(const char* rule, u32 thread);
    u64 random();

    Grid grid{};
    Dim bid{};
    Order order{};
    u64 rng = 0;
    u32 count = 0, wave_count = 0, turn = 0;
    std::vector<Thread> threads;
    std::vector<std::unique_ptr<WaveRun>> waves;
    std::vector<Array> arrays;
    std::unique_ptr<u8, Free> room;  // and dynamic shared memory in it
    size_t dynamic_bytes = 0;
    char barrier_orders[2];
    Fiber host;
};

}  // namespace emu
