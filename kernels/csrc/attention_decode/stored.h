// attention_decode/stored.h - queries lie in memory, rotated, and all keys in the pool: what ran in front saw to that.
// projected.h is the other way to come by them; both have this face.
#pragma once

struct Source {
    const half_t* q;  // [T, N D]
    u32 stride;     // elements
};

// Whether the kernel in front may still be writing into the tile at key `at`.
DEV bool is_fresh(u32 at, u32 context) { return at + TILE_KEYS >= context; }

// The queries, where the split is the team's first of its head.
DEV void begin_split(const Source& source, Queries& mine, const Place& p, bool new_head) {
    if (!new_head) return;
    const half_t* queries = source.q + (u64)p.token * source.stride + p.head * HEAD_GROUP * D;
    mine = load_queries([&](u32 query) { return query < HEAD_GROUP ? queries + query * D : nullptr; });
}

// Before the tile at key `at` is taken out of the ring.
DEV void complete_tile(const Source&, const Ring&, const Place&, u32) {}
