// workgroup.cpp - starts the waves of a workgroup and runs them in an order that the seed determines.
#include "workgroup.h"

#include <algorithm>
#include <cstdio>

namespace emu::isa {

// Initial contents of registers and LDS, so that reads of unwritten values give wrong results: as f32, the
// vector register and LDS patterns are NaN; as integers, all patterns are large.
static const u32 UNWRITTEN_VECTOR = 0x7fe0beef, UNWRITTEN_SCALAR = 0xdeadbeef, UNWRITTEN_LDS = 0x7fc0dead;
// Number of instructions after which a workgroup that is not done is suspended, so that other workgroups run.
static const u64 TURN = 1 << 20;

void AddressSpace::sort() {
    std::sort(ranges.begin(), ranges.end(), [](const AddressRange& a, const AddressRange& b) { return a.first < b.first; });
}

const AddressRange* AddressSpace::find(u64 address, u64 bytes) const {
    const auto after = std::upper_bound(ranges.begin(), ranges.end(), address,
                                        [](u64 a, const AddressRange& range) { return a < range.first; });
    if (after == ranges.begin() || !(after - 1)->contains(address, bytes)) return nullptr;
    return &*(after - 1);
}

void Workgroup::find_range(u64 address, u32 bytes, u32 lane) {
    const AddressRange* found = state->memory->find(address, bytes);
    if (found) last_range = *found;
    else if (!state->memory->has_foreign_memory) {
        char text[128];
        snprintf(text, sizeof text, "lane %u accesses %u bytes at 0x%llx, outside of all allocations", lane, bytes, address);
        fault(text);
    }
}

u8* Workgroup::lds_access(const Wave& w, u32 address, u32 bytes, LdsAccessKind access) {
    if ((u64)address + bytes > lds_bytes)
        fault("LDS address " + std::to_string(address) + " is beyond the " + std::to_string(lds_bytes) + " bytes of the workgroup");
    if (wave_count > 1) races.note(address, bytes, w.number, access);
    return lds.data() + address;
}

void Workgroup::begin(const LaunchState& s, u64 index) {
    state = &s;
    const Dim3 grid = s.launch->grid;
    id = {(u32)(index % grid.x), (u32)(index / grid.x % grid.y), (u32)(index / grid.x / grid.y)};
    order = (ExecutionOrder)(s.seed % 4);
    rng = s.seed * 0x9e3779b97f4a7c15ull + index * 0xbf58476d1ce4e5b9ull + 1;
    next_wave = 0;
    rotates = false;
    last_range = {};
    failure.clear();
    counters = {};
    lds_bytes = s.kernel->lds_bytes + s.launch->shared_bytes;
    lds.resize((lds_bytes + 15) / 4 * 4);
    for (size_t i = 0; i < lds.size(); i += 4) memcpy(&lds[i], &UNWRITTEN_LDS, 4);
    const u32 threads = s.launch->threads;
    wave_count = (threads + LANES - 1) / LANES;
    if (wave_count > 1) races.begin(lds_bytes);
    while (waves.size() < wave_count) waves.push_back(std::make_unique<Wave>());
    for (u32 i = 0; i < wave_count; ++i) {
        waves[i]->number = i;
        begin_wave(*waves[i], std::min(LANES, threads - i * LANES));
    }
    counters.waves = wave_count;
}

// Sets the initial registers of a wave as the AMDGPU HSA ABI and the kernel descriptor define them.
void Workgroup::begin_wave(Wave& w, u32 threads) {
    const Kernel& k = *state->kernel;
    for (u32 first : {0u, FIRST_ACCUMULATOR})
        std::fill_n(&w.vector[first][0], LANES * std::max(1u, first ? k.accumulators : k.vectors), UNWRITTEN_VECTOR);
    std::fill_n(w.scalar, (u32)SCALARS, UNWRITTEN_SCALAR);
    w.set_exec(threads == LANES ? ~0ull : (1ull << threads) - 1);
    for (u32 l = 0; l < LANES; ++l) w.vector[0][l] = w.number * LANES + l;
    u32 used = 0;
    const auto put = [&](u64 value, u32 words) {
        for (u32 i = 0; i < words; ++i) w.scalar[used++] = (u32)(value >> 32 * i);
    };
    const auto enabled = [&](u32 bit) { return k.properties >> bit & 1; };
    if (enabled(0)) used += 4;                      // private segment buffer
    if (enabled(1)) put((u64)state->packet, 2);
    if (enabled(2)) put(0, 2);                      // queue
    if (enabled(3)) put((u64)state->arguments, 2);
    if (enabled(4)) put(0, 2);                      // dispatch id
    if (enabled(5)) put(0, 2);                      // flat scratch
    if (enabled(6)) put(k.private_bytes, 1);
    if (k.setup >> 7 & 1) put(id.x, 1);
    if (k.setup >> 8 & 1) put(id.y, 1);
    if (k.setup >> 9 & 1) put(id.z, 1);
    w.scc = false;
    w.next = k.object->index_at.at(k.entry);
    w.state = WaveState::READY;
    w.group = this;
    w.counters = &counters;
    w.gfx = k.object->gfx;
    w.pending.clear();
}

u64 Workgroup::random() {
    rng ^= rng << 13;
    rng ^= rng >> 7;
    rng ^= rng << 17;
    return rng * 0x2545f4914f6cdd1dull >> 32;
}

// Returns the number of instructions that a wave runs before another wave is selected.
u32 Workgroup::quantum() {
    switch (order) {
        case ExecutionOrder::ROUND_ROBIN: return 16;
        case ExecutionOrder::RANDOM: return 1 + (u32)random() % 200;
        default: return 1 << 16;
    }
}

Wave* Workgroup::pick() {
    const bool next = order == ExecutionOrder::ROUND_ROBIN || rotates;
    const u32 start = order == ExecutionOrder::RANDOM ? (u32)random() % wave_count : next ? next_wave : 0;
    for (u32 i = 0; i < wave_count; ++i) {
        const u32 n = (start + i) % wave_count;
        Wave& w = *waves[order == ExecutionOrder::LAST_AHEAD ? wave_count - 1 - n : n];
        if (w.state != WaveState::READY) continue;
        next_wave = n + 1;
        return &w;
    }
    return nullptr;
}

bool Workgroup::run_wave(Wave& w, u32 instructions) {
    const Instruction* const all = state->kernel->object->instructions.data();
    const Instruction* in = nullptr;
    try {
        while (instructions-- && w.state == WaveState::READY) {
            in = &all[w.next++];
            if (!in->run) fault("unknown instruction");
            w.pending.check(*in);
            ++counters.instructions[(u32)in->unit];
            in->run(w, *in);
        }
    } catch (const EmulationFault& f) {
        char place[96];
        snprintf(place, sizeof place, ", workgroup (%u,%u,%u), wave %u, pc 0x%x: ", id.x, id.y, id.z, w.number, in->address);
        failure = "kernel " + state->kernel->name + place + in->text + ": " + f.text;
    }
    return w.state == WaveState::READY;
}

// Makes the waves at the barrier ready if all waves have reached it or are done. Returns whether any wave was
// made ready.
bool Workgroup::release_barrier() {
    bool waiting = false;
    for (u32 i = 0; i < wave_count; ++i) {
        if (waves[i]->state == WaveState::AT_BARRIER) waiting = true;
        else if (waves[i]->state != WaveState::DONE) return false;
    }
    if (!waiting) return false;
    for (u32 i = 0; i < wave_count; ++i)
        if (waves[i]->state == WaveState::AT_BARRIER) waves[i]->state = WaveState::READY;
    if (wave_count > 1) races.begin_interval();
    note_progress();
    return true;
}

BlockOutcome Workgroup::run() {
    // The sleeping waves are ready again, because other workgroups have run since the waves started to sleep.
    for (u32 i = 0; i < wave_count; ++i)
        if (waves[i]->state == WaveState::SLEEPING) waves[i]->state = WaveState::READY;
    for (u64 instructions = 0; instructions < TURN;) {
        Wave* w = pick();
        if (!w && release_barrier()) continue;
        if (!w) break;
        const u32 turn = quantum();
        rotates = run_wave(*w, turn);
        if (!failure.empty()) return BlockOutcome::RULE_VIOLATED;
        instructions += turn;
    }
    bool done = true, sleeping = false;
    for (u32 i = 0; i < wave_count; ++i) {
        done &= waves[i]->state == WaveState::DONE;
        sleeping |= waves[i]->state == WaveState::SLEEPING;
    }
    if (done) return BlockOutcome::FINISHED;
    if (!sleeping) note_progress();  // it computes
    return BlockOutcome::WAITING;
}

}  // namespace emu::isa
