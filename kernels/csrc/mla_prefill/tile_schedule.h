// mla_prefill/tile_schedule.h - order in which the tiles of all rows with keys in the window are processed:
// row by row; within a row, tiles with the most keys first; tiles with equally many keys head by head, so
// that tiles processed at the same time share keys in L2.
#pragma once

enum : u32 { TILE = STEP_KEYS };  // tokens per query tile, and keys per step

// A work item: one tile (successive tokens of a row) for one head.
struct WorkTile {
    u32 row, head;      // indices within the rows and heads of the launch
    u32 token, tokens;  // first token of the row, and number of its tokens; 0 tokens: no item
    u32 first;          // first token of the tile, relative to the row
    u32 before;         // number of keys before the row's first token
    StepRange range;    // range.steps == 0: a padding row, which has no keys
};

// Returns the number of keys that token `token` of the row attends to.
DEV u32 seen_by(const WorkTile& item, u32 token) { return item.before + token + 1; }
DEV bool has_keys_here(const WorkTile& item) { return item.range.step < item.range.end; }

// State of a search for work items by ascending index: the search has reached `row`; `items_before` and
// `keys_before` are the numbers of items and of keys of earlier rows.
struct WorkTileSearch { u32 row, items_before, keys_before; };

// Whether a row has work items in this launch: some of its keys are in the window, or the row has no keys at
// all and this is the first window.
DEV bool is_here(u32 begin, u32 span, const KeyListChunk& window) {
    return span == 0 ? window.begin == 0 : begin < window.begin + window.keys && begin + span > window.begin;
}

// Returns the work item with index `number`. Every lane of the warp must call it. If there is no such item,
// returns an empty item, and search.items_before is then the number of all items.
DEV WorkTile find(WorkTileSearch& search, const MlaPrefillParams& job, u32 number) {
    for (; search.row < job.rows.count; search.row += WARP_SIZE) {
        const RowLengths mine = lengths_of(job.rows, search.row + lane());
        const u32 span = span_of(mine), keys_up_to = search.keys_before + warp_inclusive_sum(span), begin = keys_up_to - span;
        const u32 tiles = is_here(begin, span, job.window) ? (mine.tokens + TILE - 1) / TILE : 0;
        const u32 up_to = warp_inclusive_sum(tiles * job.heads), at = warp_sum((u32)(search.items_before + up_to <= number));
        if (at < WARP_SIZE) {
            WorkTile item{};
            item.row = search.row + at;
            const u32 left = shfl(search.items_before + up_to, at) - 1 - number;  // items of the row after this one
            item.head = job.heads - 1 - left % job.heads;
            item.first = left / job.heads * TILE;
            item.tokens = shfl(mine.tokens, at);
            item.token = (u32)job.rows.cu_q[job.rows.first + item.row];
            const u32 context = shfl(mine.context, at), row_begin = shfl(begin, at);
            if (context < item.tokens) return item;
            item.before = context - item.tokens;
            const u32 end = item.first + TILE;
            item.range = steps_in_window(seen_by(item, (end < item.tokens ? end : item.tokens) - 1), row_begin, job.window);
            return item;
        }
        search.items_before += shfl(up_to, WARP_SIZE - 1);
        search.keys_before = shfl(keys_up_to, WARP_SIZE - 1);
    }
    return WorkTile{};
}
