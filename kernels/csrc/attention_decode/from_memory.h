// attention_decode/from_memory.h - source of queries and keys: rotated queries are in global memory, and all
// keys are in the KV pool, written by earlier kernels. from_projections.h is the fused alternative with the
// same interface.
#pragma once

// Source of queries and new keys. Queries are read from memory; all keys are already in the KV pool.
struct QueryKeySource {
    const half_t* q;  // [tokens, query heads * D]
    u32 stride;     // row stride of q in elements
};

// Whether the previous kernel may still be writing keys of the tile at key `at`: the keys of the row's own
// token, and of earlier tokens of its request in the same step.
DEV bool has_new_keys(u32 at, const SplitCursor& p, const BatchMetadata& rows) {
    return at + TILE_KEYS + rows.max_new_tokens > p.context;
}

// Loads the queries if this is the block's first split of a head (new_head).
DEV void begin_split(const QueryKeySource& source, QueryOperand& mine, const SplitCursor& p, bool new_head) {
    if (!new_head) return;
    const half_t* queries = source.q + (u64)p.token * source.stride + p.head * HEAD_GROUP * D;
    mine = load_queries([&](u32 query) {
        const u32 token = query / HEAD_GROUP, head = query % HEAD_GROUP;
        return token < p.count ? queries + (u64)token * source.stride + head * D : nullptr;
    });
}

// Called before the tile at key `at` is taken out of the ring. Nothing to do: the pool has all keys.
DEV void complete_tile(const QueryKeySource&, const KvTileRing&, const SplitCursor&, u32) {}
