// attention_prefill/load.h - the warpgroup that fetches queries, keys and values, for item after item, into panels that the
// other warpgroups multiply from, as far ahead as it has room. How keys and values come: load_half.h, load_fp8.h.
#pragma once
#include "dev/ring_stage.h"

enum : u32 {
    STAGES = 2,                      // of keys and of values
    ITEM_STAGES = KV_FP8 ? 1 : 2,    // of queries
    PANELS = D / 64,                 // of a row
    PANEL_BYTES = TILE * 128,
    OPERAND_BYTES = PANELS * PANEL_BYTES,
    STAGED_BYTES = KV_FP8 ? TILE * D : 0,  // keys, or values, that wait to be widened
    FETCHING = 4,                    // warps of this warpgroup
    QUERY_WARPS = KV_FP8 ? 4 : 2,    // of them, the last
    ROW_WARPS = KV_FP8 ? 4 : 1,      // that bring keys, or values
    WORKING = 8                      // warps of the others
};

struct Stages { Barrier there[STAGES], free[STAGES]; };
struct Meeting {
    Stages items, keys, values;      // items: with their queries
    Barrier last_there;              // values of a step that goes beyond its row's context
    Barrier turn[2];                 // of the warpgroups that multiply
    Item item[STAGES];
    u32 next[2];                     // number of the next item
};
struct Shared { u8 *queries, *keys, *values, *outputs, *staged; };

DEV Shared share(u8* dynamic) {
    u8* panels = on_1024(dynamic);
    u8 *keys = panels + ITEM_STAGES * OPERAND_BYTES, *values = keys + STAGES * OPERAND_BYTES;
    u8* outputs = values + STAGES * OPERAND_BYTES;
    return Shared{panels, keys, values, outputs, outputs + OPERAND_BYTES};
}

// Copies a tile's queries; zeros behind the last pair.
DEV void fetch_queries(u8* operand, const Job& job, const Item& item) {
    constexpr u32 PIECES = D / 8, AT_ONCE = QUERY_WARPS * WARP_SIZE / PIECES;
    const u32 thread = tid() - (FETCHING - QUERY_WARPS) * WARP_SIZE, piece = thread % PIECES;
    const half_t* q = job.q + (u64)item.token * job.q_stride + item.head * HEAD_GROUP * D + piece * 8;
    _Pragma("unroll 4") for (u32 i = 0; i < TILE_PAIRS; i += AT_ONCE) {
        const u32 row = i + thread / PIECES, pair = item.first + row < item.pairs ? item.first + row : 0;
        u8* to = operand + piece / 8 * PANEL_BYTES + panel_offset(row, piece % 8);
        copy16_or_zero(to, q + (u64)(pair / HEAD_GROUP) * job.q_stride + pair % HEAD_GROUP * D, item.first + row < item.pairs);
    }
    copy_commit();
    copy_wait<0>();
}

// Hands an item over, with its queries.
DEV void hand_over(const Shared& shared, Meeting* m, RingStage& turn, const Job& job, const Item& item) {
    barrier_wait(&m->items.free[turn.stage], turn.odd ^ 1);
    if (warp_id() == FETCHING - 1 && lane() == 0) m->item[turn.stage] = item;
    if (item.pairs != 0) fetch_queries(shared.queries + turn.stage * OPERAND_BYTES, job, item);
    release_written(&m->items.there[turn.stage]);
    advance<ITEM_STAGES>(turn);
}

// Hands out items until there are no more; `fetch(item)` for each, and once for the one that is missing.
template <class Fetch> DEV void each_item(Meeting* m, const Job& job, const Fetch& fetch) {
    Search search{};
    u32 number = bid_x();
    for (u32 odd = 0;; odd ^= 1) {
        const Item item = find(search, job, number);
        const bool leader = tid() == 0;
        if (item.pairs == 0) {
            fetch(item);
            // Whoever has an item takes the number of the next one: as many numbers as there are items.
            // The holder of the last of them was the last to count.
            const u32 numbers = search.items_before;
            if (leader && number >= gdim_x() && number - gdim_x() + 1 == numbers) atomic_add(job.taken, 0u - numbers);
            return;
        }
        const u32 taken = leader ? atomic_add(job.taken, 1u) : 0;
        fetch(item);
        if (leader) m->next[odd] = gdim_x() + taken;
        some_sync<1>(FETCHING * WARP_SIZE);
        number = m->next[odd];
    }
}
