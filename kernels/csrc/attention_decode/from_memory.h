// attention_decode/from_memory.h - queries and keys for decode attention without fused RoPE: an earlier
// kernel has written the queries after RoPE to global memory, and the keys to the KV pool. from_projections.h
// has the same interface and computes norm and RoPE itself.
#pragma once

// Addresses and strides from which queries are loaded. The keys of all tokens are already in the KV pool.
struct QueryKeySource {
    const half_t* q;  // [tokens, query heads * D]
    u32 stride;     // row stride of q in elements
};

// Whether the tile that begins at key `at` has keys of tokens of this step, which the previous kernel may
// still be writing: the keys of the row's token and of earlier tokens of the same request in this step.
DEV bool has_new_keys(u32 at, const SplitCursor& p, const BatchMetadata& rows) {
    return at + TILE_KEYS + rows.max_new_tokens > p.context;
}

// Loads the queries of the head at `p` if the block begins a new head (`new_head`); for further splits of the
// same head the queries are still in registers.
DEV void begin_split(const QueryKeySource& source, QueryOperand& mine, const SplitCursor& p, bool new_head) {
    if (!new_head) return;
    const half_t* queries = source.q + (u64)p.token * source.stride + p.head * HEAD_GROUP * D;
    mine = load_queries([&](u32 query) {
        const u32 token = query / HEAD_GROUP, head = query % HEAD_GROUP;
        return token < p.count ? queries + (u64)token * source.stride + head * D : nullptr;
    });
}

// Does nothing, because all keys are in the KV pool. In from_projections.h this function writes the key and
// value of the row's token into the tile at key `at` in the ring buffer.
DEV void complete_tile(const QueryKeySource&, const KvTileRing&, const SplitCursor&, u32) {}
