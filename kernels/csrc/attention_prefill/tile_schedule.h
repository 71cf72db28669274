// attention_prefill/tile_schedule.h - order in which the tiles of all rows are processed: row by row; within
// a row, tiles with the most keys first; tiles with equally many keys head by head, so that tiles processed
// at the same time share keys in L2.
#pragma once

enum : u32 {
    CHANNEL_GROUPS = D > 256 ? 2 : 1,    // consumer warpgroups that share the pairs of a tile and divide its channels
    TILE_PAIRS = 128 / CHANNEL_GROUPS,   // (query, head) pairs per tile
    TILE = D > 256 ? 32 : D > 128 ? 64 : 128  // keys per step; shared memory has two steps
};

// A work item: one tile, that is, successive (query, head) pairs of one row and KV head.
struct WorkTile {
    u32 row, head;
    u32 token, pairs;  // the row's first token; number of its pairs per KV head, 0: no item
    u32 first;         // first pair of the tile
    u32 before;        // number of keys before the row's first token
    u32 steps;         // number of steps of TILE keys; 0 for a padding row, which has no keys
#if WINDOWED
    u32 first_key;     // first key of the tile's first token; no later token attends to an earlier key
#endif
};
#if WINDOWED
DEV u32 first_key(const WorkTile& item) { return item.first_key; }
#else
DEV u32 first_key(const WorkTile&) { return 0; }
#endif
// Returns the first step that a tile multiplies. Earlier steps have no key of its tokens.
DEV u32 first_step(const WorkTile& item) { return first_key(item) / TILE; }

// Returns the number of keys that (query, head) pair `pair` of the row attends to.
DEV u32 seen_by(const WorkTile& item, u32 pair) { return item.before + pair / HEAD_GROUP + 1; }

// State of a search for work items by ascending index: the search has reached `row`; `items_before` is the
// number of items of earlier rows.
struct WorkTileSearch { u32 row, items_before; };

// Returns the work item with index `number`. Every lane of the warp must call it. If there is no such item,
// returns an empty item, and search.items_before is then the number of all items.
DEV WorkTile find(WorkTileSearch& search, const PrefillParams& job, u32 number) {
    for (; search.row < job.rows; search.row += WARP_SIZE) {
        const u32 mine = search.row + lane();
        const i32* cu_q = job.cu_q + job.first_row + mine;
        const u32 pairs = mine < job.rows ? (u32)(cu_q[1] - cu_q[0]) * HEAD_GROUP : 0;
        const u32 items = (pairs + TILE_PAIRS - 1) / TILE_PAIRS * job.kv_heads, up_to = warp_inclusive_sum(items);
        const u32 at = warp_sum((u32)(search.items_before + up_to <= number));
        if (at < WARP_SIZE) {
            WorkTile item{};
            item.row = job.first_row + search.row + at;
            const u32 left = shfl(search.items_before + up_to, at) - 1 - number;  // items of the row after this one
            item.head = job.kv_heads - 1 - left % job.kv_heads;
            item.first = left / job.kv_heads * TILE_PAIRS;
            item.pairs = shfl(pairs, at);
            item.token = (u32)job.cu_q[item.row];
            const u32 context = (u32)job.context_lens[item.row], tokens = item.pairs / HEAD_GROUP;
            if (context < tokens) return item;
            item.before = context - tokens;
#if WINDOWED
            item.first_key = first_key_of(job, seen_by(item, item.first));
#endif
            const u32 end = item.first + TILE_PAIRS;
            item.steps = (seen_by(item, (end < item.pairs ? end : item.pairs) - 1) + TILE - 1) / TILE;
            return item;
        }
        search.items_before += shfl(up_to, WARP_SIZE - 1);
    }
    return WorkTile{};
}
