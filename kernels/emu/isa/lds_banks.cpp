// lds_banks.cpp - groups of lanes and banks of LDS accesses by architecture.
#include "lds_banks.h"

#include <algorithm>

#include "../hip.h"

namespace emu::isa {

namespace {

// Order in which the eight runs of 4 lanes of each half of a wave are served by reads of 16 bytes.
const u8 READ_128_GFX942[8] = {0, 5, 1, 4, 2, 7, 3, 6};
const u8 READ_128_GFX950[8] = {0, 3, 5, 6, 1, 2, 4, 7};

const u32 MOST_BANKS = 64;

// How an access is served: lanes per group, number of banks, and the order of runs of 4 lanes; null: ascending.
struct LdsServiceOrder {
    u32 lanes, banks;
    const u8* runs = nullptr;

    u32 lane_at(u32 position) const { return runs ? position / 32 * 32 + runs[position / 4 % 8] * 4u + position % 4 : position; }
};

LdsServiceOrder service_order(u32 gfx, LdsAccessKind kind, u32 bytes) {
    const bool reads = kind == LdsAccessKind::READ, is_gfx950 = gfx == 0x950;
    if (reads && bytes == 16) return is_gfx950 ? LdsServiceOrder{16, 64, READ_128_GFX950} : LdsServiceOrder{8, 32, READ_128_GFX942};
    if (reads && bytes == 8 && is_gfx950) return {32, 64};
    return {bytes > 8 ? 8u : bytes > 4 ? 16u : 32u, 32};
}

// Words that a group of lanes accesses, by bank.
struct BankWords {
    u32 words[MOST_BANKS][LANES];
    u32 counts[MOST_BANKS] = {};
    u32 cycles = 0;

    void add(u32 word, u32 bank) {
        u32 *const begin = words[bank], *const end = begin + counts[bank];
        if (std::find(begin, end, word) != end) return;
        *end = word;
        cycles = std::max(cycles, ++counts[bank]);
    }
};

}  // namespace

LdsAccessCycles lds_access_cycles(u32 gfx, LdsAccessKind kind, u32 bytes, const u32* addresses, u64 active) {
    const LdsServiceOrder order = service_order(gfx, kind, bytes);
    const u32 words = std::max(bytes / 4, 1u);
    LdsAccessCycles total;
    for (u32 first = 0; first < LANES; first += order.lanes) {
        BankWords accessed;
        for (u32 position = first; position < first + order.lanes; ++position) {
            const u32 lane = order.lane_at(position), word = addresses[lane] / 4;
            if (!(active >> lane & 1)) continue;
            for (u32 i = word; i < word + words; ++i) accessed.add(i, i % order.banks);
        }
        total.cycles += accessed.cycles;
        total.ideal += accessed.cycles != 0;
    }
    return total;
}

// For tests: cycles of an access of 64 lanes that bank conflicts cause. `kind`: an LdsAccessKind.
HIP u32 hipemuLdsConflicts(u32 gfx, u32 kind, u32 bytes, const u32* addresses, u64 active) {
    const LdsAccessCycles found = lds_access_cycles(gfx, (LdsAccessKind)kind, bytes, addresses, active);
    return found.cycles - found.ideal;
}

}  // namespace emu::isa
