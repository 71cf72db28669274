// mla_decode/register_ring.h - with warps of 64 lanes the next step is loaded into registers. As soon as a vector of it
// has been stored to shared memory, which has one stage, that of the step after it is loaded into its register: COUNT
// vectors of a lane are in flight at every wait.
#pragma once
static_assert(STAGES == 1, "shared memory has one stage");
static_assert(OWN_PIECES >= WARP_SIZE, "some lanes have no vector");

// Vector i of this lane among the vectors of its warp's rows. Lanes beyond the rows copy their vector before it again,
// to avoid a branch.
DEV u32 own_piece(u32 i) {
    const u32 piece = i * WARP_SIZE + lane();
    return OWN_PIECES % WARP_SIZE == 0 || piece < OWN_PIECES ? piece : piece - WARP_SIZE;
}
DEV u32 stage_element(u32 piece) { return warp_id() * ROWS_OF_WARP * LINE + piece * 8 + piece / PIECES * (LINE - WIDTH); }

// Returns the address of the rows that this warp loads of the next step. Without a next step, or if all of them are
// beyond the split, these are other rows of the pool, and replaced by zeros.
DEV const half_t* next_rows(const KvStageRing& r, const half_t* pool) {
    const u32 key = r.at + warp_id() * ROWS_OF_WARP;
    return pool + ((u64)r.block * BLOCK_TOKENS + key % BLOCK_TOKENS) * WIDTH;
}

// Loads vector i of the rows at `from`.
DEV void load_vector(KvStageRing& r, const half_t* from, u32 i) {
    r.loaded[i] = load_piece(from + own_piece(i) * 8);
    keep_load_order();
}

// Called when the next step has been loaded: goes on to the step after it. Rows beyond the end of the split are
// zero-filled, because freed KV blocks may contain NaN.
DEV void advance_step(KvStageRing& r, const BatchMetadata& rows) {
    const u32 key = r.at + warp_id() * ROWS_OF_WARP;
    r.present = r.cursor.left != 0 && key < r.end ? r.end - key : 0;
    if (r.cursor.left == 0) return;
    r.at += KEYS;
    seek_step(r, rows);
}

DEV void fetch(KvStageRing& r, const BatchMetadata& rows, const half_t* pool) {
    if (r.cursor.left == 0) return;
    const half_t* from = next_rows(r, pool);
    UNROLL for (u32 i = 0; i < COUNT; ++i) load_vector(r, from, i);
    advance_step(r, rows);
}

// Returns the KV rows of the oldest step that has been loaded, after storing them to shared memory and waiting until all
// warps have read the previous step. Loads the next step. Every thread of the team must call it.
DEV const half_t* next_step(KvStageRing& r, const BatchMetadata& rows, const half_t* pool) {
    const half_t* from = next_rows(r, pool);
    team_sync();
    UNROLL for (u32 i = 0; i < COUNT; ++i) {
        const u32 piece = own_piece(i);
        store_loaded(r.steps + stage_element(piece), r.loaded[i], piece / PIECES < r.present);
        load_vector(r, from, i);
    }
    advance_step(r, rows);
    team_sync();
    return r.steps;
}
