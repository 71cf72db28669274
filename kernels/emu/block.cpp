#include "block.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace emu {

__thread ThreadContext* self;

// Number of bytes by which dynamic shared memory starts after a multiple of 1024, so that kernels cannot rely
// on an alignment of more than 16 bytes.
static const size_t DYNAMIC_OFFSET = 16;

static EmulatedThread& running() { return *static_cast<EmulatedThread*>(self); }
void wave_sync(u32 site, Combine combine, WaveExchange& e) { running().block->wave_sync(site, combine, e); }
void block_sync() { running().block->block_sync(); }
void pause() { running().block->pause(); }
void note_progress() { running().block->note_progress(); }
void cluster_arrive(u32 size) {
    EmulatedThread& me = running();
    ClusterBlockState& mine = me.block->cluster_state(size, me.bid->x % size);
    mine.dynamic.store(me.dynamic, std::memory_order_relaxed);
    released(&mine); // This library is not instrumented, so ThreadSanitizer does not see its atomics.
    mine.arrived.fetch_add(1, std::memory_order_acq_rel);
}
void cluster_wait(u32 size) {
    for (u32 rank = 0; rank < size; ++rank) {
        ClusterBlockState& cluster_state = running().block->cluster_state(size, rank);
        while (cluster_state.arrived.load(std::memory_order_acquire) < running().bdim) pause();
        acquired(&cluster_state);
    }
}
u8* peer_dynamic(u32 size, u32 rank) {
    return running().block->cluster_state(size, rank).dynamic.load(std::memory_order_relaxed);
}
void* shared_array(const void* key, size_t bytes, size_t alignment) {
    return running().block->shared_array(key, bytes, alignment);
}
void rule_violated(const char* rule) { running().block->rule_violated(rule); }

Block::~Block() {
    for (EmulatedThread& t : threads)
        if (t.fiber.stack) fiber_close(t.fiber);
    release_arrays();
}

void Block::release_arrays() {
    for (SharedArray& a : arrays) free(a.memory);
    arrays.clear();
}

u64 Block::random() {
    rng ^= rng << 13;
    rng ^= rng >> 7;
    rng ^= rng << 17;
    return rng;
}

void Block::begin(const GridState& g, u64 index) {
    // Frees the static shared arrays of the previous kernel, because each lookup of a shared array searches
    // all entries of `arrays`.
    if (grid.entry != g.entry) release_arrays();
    grid = g;
    const Dim3& size = g.launch->grid;
    bid = {(u32)(index % size.x), (u32)(index / size.x % size.y), (u32)(index / size.x / size.y)};
    order = (ExecutionOrder)(g.seed % 4);
    rng = (g.seed * 0x9e3779b97f4a7c15u + index * 0xd1342543de82ef95u) | 1;
    next_wave = 0;
    failure.clear();
    count = g.launch->threads;
    wave_count = (count + g.wave - 1) / g.wave;
    if (threads.size() < count) threads.resize(count);
    while (waves.size() < wave_count) waves.push_back(std::make_unique<WaveExecutionState>());
    for (SharedArray& a : arrays) a.fresh = true;
    // The allocation has exactly the requested number of bytes, so that AddressSanitizer detects an access to
    // the first byte after its end. Dynamic shared memory has the same offset from a multiple of 1024 in
    // every block, because the blocks of a cluster address each other's memory by offsets from the start.
    if (dynamic_bytes != g.launch->shared_bytes || !dynamic_memory) {
        dynamic_bytes = g.launch->shared_bytes;
        void* fresh = nullptr;
        if (posix_memalign(&fresh, 1024, DYNAMIC_OFFSET + dynamic_bytes)) abort();
        dynamic_memory.reset((u8*)fresh);
    }
    u8* dynamic = dynamic_memory.get() + DYNAMIC_OFFSET;
    memset(dynamic, 0xff, dynamic_bytes);
    for (u32 w = 0; w < wave_count; ++w) {
        WaveExecutionState& wave = *waves[w];
        wave.first = w * g.wave;
        wave.lanes = std::min(g.wave, count - wave.first);
        wave.arrived = 0;
        memset(wave.states, (int)State::READY, sizeof wave.states);
        if (wave.lanes < g.wave) memset((void*)wave.exchange, 0xff, sizeof wave.exchange);
        const bool reversed = order == ExecutionOrder::LAST_AHEAD;
        for (u32 i = 0; i < wave.lanes; ++i) wave.order[i] = (u8)(reversed ? wave.lanes - 1 - i : i);
        arrange(wave);
    }
    for (u32 i = 0; i < count; ++i) {
        EmulatedThread& t = threads[i];
        t.tid = i;
        t.lane = i % g.wave;
        t.buffer = 0;
        t.barriers = 0;
        t.wave = waves[i / g.wave].get();
        t.bid = &bid;
        t.grid = &grid.launch->grid;
        t.bdim = count;
        t.dynamic = dynamic;
        t.dynamic_bytes = (u32)dynamic_bytes;
        t.block = this;
        t.started = false;
        // With ThreadSanitizer, the host thread creates all fibers here. If another emulated thread of the
        // block created a fiber, ThreadSanitizer would treat the earlier accesses of that thread as ordered
        // before all accesses of the new fiber, and would miss data races.
        if (races_watched()) arm(t);
    }
}

// Sets the order in which the lanes of wave `w` run until the wave's next collective.
void Block::arrange(WaveExecutionState& w) {
    w.position = 0;
    if (!shuffles()) return;
    for (u32 i = w.lanes - 1; i > 0; --i) std::swap(w.order[i], w.order[random() % (i + 1)]);
}

EmulatedThread* Block::next_ready(WaveExecutionState& w, u32 from) {
    for (u32 i = from; i < w.lanes; ++i) {
        const u32 lane = w.order[i];
        if (w.states[lane] != State::READY) continue;
        w.position = i;
        return &threads[w.first + lane];
    }
    return nullptr;
}

static void enter_thread() {
    fiber_entered();
    running().block->thread_main();
}

void Block::arm(EmulatedThread& t) {
    t.started = true;
    if (!t.fiber.stack) fiber_open(t.fiber);
    fiber_arm(t.fiber, t.tid, enter_thread);
}

// Switches from thread `me` to thread `next`, or to the fiber of run() if `next` is null. `ends`: `me` never
// runs again.
void Block::switch_to(EmulatedThread& me, EmulatedThread* next, bool ends) {
    if (next == nullptr) {
        fiber_switch(me.fiber, host, ends);
        return;
    }
    if (!next->started) arm(*next);
    self = next;
    fiber_switch(me.fiber, next->fiber, ends);
}

void Block::thread_main() {
    for (;;) {
        EmulatedThread& me = current();
        acquired(&grid);
        grid.entry(grid.args);
        released(&host);  // `grid` here would order threads that begin later after this one.
        WaveExecutionState& w = wave_of(me);
        w.states[me.lane] = State::DONE;
        EmulatedThread* next = next_ready(w, w.position + 1);
        if (next == nullptr || next->started) switch_to(me, next, true);
        // The next thread starts on this thread's stack, so that a thread that calls no collective needs no
        // context switch.
        std::swap(me.fiber, next->fiber);
        next->started = true;
        self = next;
    }
}

void Block::wave_sync(u32 site, Combine combine, WaveExchange& e) {
    EmulatedThread& me = current();
    WaveExecutionState& w = wave_of(me);
    if (w.arrived == 0) w.site = site;
    if (w.site != site) rule_violated("lanes of one wave are at different collectives");
    released(&e);
    if (++w.arrived < w.lanes) {
        w.states[me.lane] = State::AT_WAVE;
        switch_to(me, next_ready(w, w.position + 1), false);
        acquired(&e);
        return;
    }
    acquired(&e);
    if (combine) combine(e);
    released(&e);
    w.arrived = 0;
    memset(w.states, (int)State::READY, w.lanes);
    arrange(w);
    const bool others = wave_count > 1 && (order == ExecutionOrder::ROUND_ROBIN || order == ExecutionOrder::RANDOM);
    EmulatedThread* next = others ? nullptr : next_ready(w, 0);
    if (next != &me) switch_to(me, next, false);
    acquired(&e);
}

// Sets the state of the running thread to `state`, and suspends the thread until its state is READY again.
void Block::wait(State state) {
    EmulatedThread& me = current();
    WaveExecutionState& w = wave_of(me);
    w.states[me.lane] = state;
    switch_to(me, next_ready(w, w.position + 1), false);
}

void Block::block_sync() {
    // ThreadSanitizer orders memory accesses by sync objects. Successive barriers alternate between two sync
    // objects, so that a wave that has already reached the next barrier is not ordered with waves that are
    // still at this barrier.
    void* order = barrier_orders + (current().barriers++ & 1);
    released(order);
    wait(State::AT_BLOCK);
    acquired(order);
}

void Block::pause() { wait(State::PAUSED); }

// Returns the state of block `rank` of this block's cluster.
ClusterBlockState& Block::cluster_state(u32 size, u32 rank) {
    const Dim3& grid_size = grid.launch->grid;
    if (grid_size.x % size != 0) rule_violated("clusters do not divide the grid");
    const u64 row = (u64)bid.z * grid_size.y + bid.y;
    return grid.cluster_states[row * grid_size.x + bid.x / size * size + rank];
}

void* Block::shared_array(const void* key, size_t bytes, size_t alignment) {
    SharedArray* found = nullptr;
    for (SharedArray& a : arrays)
        if (a.key == key && a.bytes == bytes) found = &a;
    if (!found) {
        u8* const memory = (u8*)aligned_alloc(64, (alignment + bytes + 63) / 64 * 64);
        arrays.push_back({key, bytes, memory, memory + alignment, true});
        found = &arrays.back();
    }
    if (found->fresh) {
        memset(found->data, 0xff, bytes);
        released(found->data);
        found->fresh = false;
    }
    acquired(found->data);  // Orders only the fill before this thread, not uses of the array.
    return found->data;
}

void Block::report(const char* rule, u32 thread) {
    char text[400];
    snprintf(text, sizeof text, "kernel %s, block (%u,%u,%u), thread %u of %u: %s", grid.name, bid.x, bid.y, bid.z,
             thread, count, rule);
    failure = text;
}

void Block::rule_violated(const char* rule) {
    EmulatedThread& me = current();
    report(rule, me.tid);
    switch_to(me, nullptr, true);
    abort();
}

bool Block::has(const WaveExecutionState& w, State state) const {
    return memchr(w.states, (int)state, w.lanes) != nullptr;
}

WaveExecutionState* Block::pick() {
    const u32 n = wave_count;
    u32 from = order == ExecutionOrder::ROUND_ROBIN ? next_wave++ : order == ExecutionOrder::RANDOM ? (u32)(random() % n) : 0;
    for (u32 i = 0; i < n; ++i) {
        const u32 w = order == ExecutionOrder::LAST_AHEAD ? n - 1 - i : (from + i) % n;
        if (has(*waves[w], State::READY)) return waves[w].get();
    }
    return nullptr;
}

void Block::run_wave(WaveExecutionState& w) {
    EmulatedThread* first = next_ready(w, 0);
    if (!first->started) arm(*first);
    self = first;
    fiber_switch(host, first->fiber, false);
    if (!failure.empty() || w.arrived == 0 || has(w, State::READY) || has(w, State::PAUSED)) return;
    u32 waiting = 0;
    while (w.states[waiting] != State::AT_WAVE) ++waiting;
    report(has(w, State::DONE) ? "wave collective after lanes of the wave returned"
                               : "wave collective while lanes of the wave wait at a block barrier", w.first + waiting);
}

// Resumes the threads that wait at a block barrier. Precondition: every thread is at the barrier or has
// returned. Returns false if every thread has returned.
bool Block::release_barrier() {
    u32 at = 0, last = 0;
    for (u32 i = 0; i < count; ++i)
        if (waves[i / grid.wave]->states[i % grid.wave] == State::AT_BLOCK) { ++at; last = i; }
    if (at == 0) return false;
    if (at < count) {
        report("block barrier after threads of the block returned", last);
        return true;
    }
    for (u32 w = 0; w < wave_count; ++w) {
        memset(waves[w]->states, (int)State::READY, waves[w]->lanes);
        arrange(*waves[w]);
    }
    return true;
}

// Makes all threads that called pause() ready. Returns false if no thread was paused.
bool Block::wake() {
    bool any = false;
    for (u32 w = 0; w < wave_count; ++w)
        for (u32 i = 0; i < waves[w]->lanes; ++i) {
            State& state = waves[w]->states[i];
            if (state != State::PAUSED) continue;
            state = State::READY;
            any = true;
        }
    return any;
}

BlockOutcome Block::run() {
    fiber_host(host);
    released(&grid);
    u32 rounds = 0;
    for (;;) {
        if (WaveExecutionState* w = pick()) {
            run_wave(*w);
        } else if (bool paused = wake(); paused && ++rounds > 4) {
            return BlockOutcome::WAITING;  // Paused threads were resumed four times; other blocks must run.
        } else if (!paused && !release_barrier()) {
            break;
        }
        if (!failure.empty()) return BlockOutcome::RULE_VIOLATED;
    }
    acquired(&host);
    return BlockOutcome::FINISHED;
}

}  // namespace emu
