// mla_decode/ring.h - how steps of rows reach shared memory: STAGES of them, all but one on their way while one is multiplied;
// each warp fetches FETCHED rows of one block.
#pragma once

enum : u32 {
    PIECES = WIDTH / 8,  // of a row
    FETCHED = KEYS / WARPS,
    OWN_PIECES = FETCHED * PIECES,
    STEP_VALUES = KEYS * LINE
};

struct Ring {
    half_t* steps;
    u32 next, oldest;  // stages: to fetch into, to multiply
    // The next step to fetch: it runs ahead of the one that is multiplied.
    Place place;
    u32 at, end;  // keys of the split
    u32 block;    // of the warp's rows, loaded one step early
};

// To the split's first step, or that of the next split that has one.
DEV void settle(Ring& r, const Rows& rows) {
    while (r.place.left != 0 && r.at >= r.end) {
        next_place(r.place, rows);
        if (r.place.left == 0) return;
        r.at = first_key(r.place);
        r.end = end_key(r.place);
    }
    const u32 key = r.at + warp_id() * FETCHED;
    if (r.place.left != 0 && key < r.end) r.block = (u32)rows.tables[(u64)r.place.table * rows.table_width + key / BLOCK_TOKENS];
}

// Starts the copies of a step; of none behind the last. Rows at or behind the split's end become zero, whatever an earlier owner
// left there. Every thread must come.
DEV void fetch(Ring& r, const Rows& rows, const half_t* pool) {
    if (r.place.left != 0) {
        const u32 key = r.at + warp_id() * FETCHED;
        const half_t* from = pool + ((u64)r.block * BLOCK_TOKENS + key % BLOCK_TOKENS) * WIDTH;
        half_t* to = r.steps + r.next * STEP_VALUES + warp_id() * FETCHED * LINE;
        UNROLL for (u32 i = 0; i < (OWN_PIECES + WARP_SIZE - 1) / WARP_SIZE; ++i) {
            const u32 piece = i * WARP_SIZE + lane(), row = piece / PIECES;
            if (OWN_PIECES % WARP_SIZE != 0 && piece >= OWN_PIECES) break;
            const bool present = key + row < r.end;
            copy16_or_zero(to + piece * 8 + row * (LINE - WIDTH), present ? from + piece * 8 : pool, present);
        }
        r.at += KEYS;
        settle(r, rows);
    }
    copy_commit();
    r.next = r.next + 1 == STAGES ? 0 : r.next + 1;
}

DEV Ring begin_ring(half_t* steps, const Place& place, const Rows& rows, const half_t* pool) {
    Ring r{steps, 0, 0, place, 0, 0, 0};
    if (place.left != 0) {
        r.at = first_key(place);
        r.end = end_key(place);
        settle(r, rows);
    }
    for (u32 i = 0; i + 1 < STAGES; ++i) fetch(r, rows, pool);
    return r;
}

// The oldest step, once it is there and nobody reads the one before, whose stage the next copies go to. Every thread must come.
DEV const half_t* next_step(Ring& r, const Rows& rows, const half_t* pool) {
#if STAGES == 1
    team_sync();
    fetch(r, rows, pool);
    copy_wait<0>();
    team_sync();
#else
    copy_wait<STAGES - 2>();
    team_sync();
    fetch(r, rows, pool);
#endif
    const half_t* step = r.steps + r.oldest * STEP_VALUES;
    r.oldest = r.oldest + 1 == STAGES ? 0 : r.oldest + 1;
    return step;
}
