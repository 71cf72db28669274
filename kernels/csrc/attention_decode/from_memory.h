// attention_decode/from_memory.h - queries lie in memory, rotated, and all keys in the pool: what ran in front saw to that.
// from_projections.h is the other way to come by them; both have this face.
#pragma once

struct Source {
    const half_t* q;  // [T, N D]
    u32 stride;     // elements
};

// Whether the kernel in front may still be writing into the tile at key `at`: keys of the row's own token, and of those in front of
// it in the same step.
DEV bool is_fresh(u32 at, const Place& p, const Rows& rows) { return at + TILE_KEYS + rows.fresh > p.context; }

// The queries, where the split is the team's first of its head.
DEV void begin_split(const Source& source, Queries& mine, const Place& p, bool new_head) {
    if (!new_head) return;
    const half_t* queries = source.q + (u64)p.token * source.stride + p.head * HEAD_GROUP * D;
    mine = load_queries([&](u32 query) {
        const u32 token = query / HEAD_GROUP, head = query % HEAD_GROUP;
        return token < p.count ? queries + (u64)token * source.stride + head * D : nullptr;
    });
}

// Before the tile at key `at` is taken out of the ring.
DEV void complete_tile(const Source&, const Ring&, const Place&, u32) {}
