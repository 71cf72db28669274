// mla_decode/ring.h - loads KV rows into a ring buffer of STAGES stages in shared memory, KEYS rows (a step)
// per stage. While the MMAs read one stage, the copies into the other stages are in flight. Each warp loads
// ROWS_OF_WARP rows per step, all from one KV block. Warps of 64 lanes load the next step into registers instead
// (register_ring.h).
#pragma once
#include "dev/scalar.h"
#if WARP_SIZE == 64
#  include "dev/register_copy.h"
#endif

enum : u32 {
    PIECES = WIDTH / 8,  // copies per row
    ROWS_OF_WARP = KEYS / WARPS,
    OWN_PIECES = ROWS_OF_WARP * PIECES,
    COUNT = (OWN_PIECES + WARP_SIZE - 1) / WARP_SIZE,  // copies per lane and step
    STEP_VALUES = KEYS * LINE
};

// Ring of pipeline stages in shared memory; a stage has the keys of one step.
struct KvStageRing {
    half_t* steps;
    u32 next, oldest;  // stage to load into; stage to multiply
    // Next step to load, which is ahead of the step that the MMAs process.
    SplitCursor cursor;
    u32 at, end;  // current key, and end of the split
    u32 block;    // block-table entry of the warp's rows, loaded one step in advance
#if WARP_SIZE == 64
    u32 present = 0;  // rows of this warp in the loaded step
    u32x4 loaded[COUNT] = {};
#endif
};

// If all steps of the current split have been loaded, advances to the next split that is not empty. Then
// loads the block-table entry of the next step.
DEV void seek_step(KvStageRing& r, const BatchMetadata& rows) {
    while (r.cursor.left != 0 && r.at >= r.end) {
        advance_cursor(r.cursor, rows);
        if (r.cursor.left == 0) return;
        r.at = first_key(r.cursor);
        r.end = end_key(r.cursor);
    }
    const u32 key = r.at + warp_id() * ROWS_OF_WARP;
    if (r.cursor.left != 0 && key < r.end) r.block = (u32)load_scalar(rows.tables + (u64)r.cursor.table * rows.table_width + key / BLOCK_TOKENS);
}

#if WARP_SIZE == 64
#  include "mla_decode/register_ring.h"
#else
// Starts copying the KV rows of a step that this warp loads, from key `key` on. Rows of keys from `end` on
// are beyond the split and are zero-filled.
DEV void copy_rows(half_t* to, const half_t* from, const half_t* pool, u32 key, u32 end) {
    UNROLL for (u32 i = 0; i < COUNT; ++i) {
        const u32 piece = i * WARP_SIZE + lane(), row = piece / PIECES;
        if (OWN_PIECES % WARP_SIZE != 0 && piece >= OWN_PIECES) break;
        const bool present = key + row < end;
        cp_async16_zfill(to + piece * 8 + row * (LINE - WIDTH), present ? from + piece * 8 : pool, present);
    }
}

// Starts the copies of the next step, if there is one. Rows beyond the end of the split are zero-filled,
// because freed KV blocks may contain NaN. Every thread of the team must call it.
DEV void fetch(KvStageRing& r, const BatchMetadata& rows, const half_t* pool) {
    if (r.cursor.left != 0) {
        const u32 key = r.at + warp_id() * ROWS_OF_WARP;
        const half_t* from = pool + ((u64)r.block * BLOCK_TOKENS + key % BLOCK_TOKENS) * WIDTH;
        half_t* to = r.steps + r.next * STEP_VALUES + warp_id() * ROWS_OF_WARP * LINE;
        copy_rows(to, from, pool, key, r.end);
        r.at += KEYS;
        seek_step(r, rows);
    }
    cp_async_commit();
    r.next = r.next + 1 == STAGES ? 0 : r.next + 1;
}

// Returns the KV rows of the oldest step in the ring buffer, after waiting until their copies have completed
// and until all warps have read the previous step, whose stage the next copies overwrite. Every thread of the
// team must call it.
DEV const half_t* next_step(KvStageRing& r, const BatchMetadata& rows, const half_t* pool) {
#if STAGES == 1
    team_sync();
    fetch(r, rows, pool);
    cp_async_wait<0>();
    team_sync();
#else
    cp_async_wait<STAGES - 2>();
    team_sync();
    fetch(r, rows, pool);
#endif
    const half_t* step = r.steps + r.oldest * STEP_VALUES;
    r.oldest = r.oldest + 1 == STAGES ? 0 : r.oldest + 1;
    return step;
}
#endif

DEV KvStageRing begin_ring(half_t* steps, const SplitCursor& cursor, const BatchMetadata& rows, const half_t* pool) {
    KvStageRing r{steps, 0, 0, cursor, 0, 0, 0};
    if (cursor.left != 0) {
        r.at = first_key(cursor);
        r.end = end_key(cursor);
        seek_step(r, rows);
    }
    for (u32 i = 0; i + 1 < STAGES + (WARP_SIZE == 64 ? 1 : 0); ++i) fetch(r, rows, pool);
    return r;
}
