// attention_single_row/share.h - assigns keys to blocks, and defines the shared memory layout of a block. One
// thread block cluster processes one row and KV head; each block of the cluster processes an equal number of
// consecutive key tiles.
#pragma once

// Split of a block: a row and KV head, and the range of its keys that the block processes.
struct SplitCursor {
    u32 row, head, rank;  // rank: rank of the block in its cluster
    u32 context, token, position;
    const i32* table;
    u32 first, end;     // range of the block's keys
    u32 split, splits;  // index of the block among the blocks with keys, and number of blocks with keys
#if WINDOWED
    u32 origin, window;  // first key of the first block; maximum number of keys that the row attends to
    u32 count;           // rows of the block: 1
#endif
};
#if WINDOWED
DEV u32 origin_of(const SplitCursor& p) { return p.origin; }
#else
DEV u32 origin_of(const SplitCursor&) { return 0; }
#endif
DEV u32 first_key(const SplitCursor& p) { return p.first; }

// Arrays and sizes that describe the rows of the step, from the arguments of the kernel.
struct BatchMetadata {
    const i32 *context_lens, *cu_q, *tables, *table_rows, *positions;
    u32 kv_heads, table_width;
#if WINDOWED
    u32 window;
#endif
};

DEV SplitCursor cursor_of_block(const BatchMetadata& rows) {
    const u32 unit = bid_x() / BLOCKS;
    SplitCursor p{};
    p.rank = p.split = cluster_rank<BLOCKS>();
    p.row = unit / rows.kv_heads;
    p.head = unit % rows.kv_heads;
    p.context = (u32)rows.context_lens[p.row];
    p.token = (u32)rows.cu_q[p.row];
    p.table = rows.tables + (u64)(rows.table_rows ? (u32)rows.table_rows[p.row] : p.row) * rows.table_width;
    p.position = (u32)rows.positions[p.token];
#if WINDOWED
    p.window = rows.window;
    p.count = 1;
    p.origin = first_key_of(p.context, rows.window, 0) / TILE_KEYS * TILE_KEYS;
#endif
    const u32 keys = p.context - origin_of(p);
    const u32 tiles = (keys + TILE_KEYS - 1) / TILE_KEYS, each = (tiles + BLOCKS - 1) / BLOCKS;
    p.splits = tiles == 0 ? 0 : (tiles + each - 1) / each;
    p.first = origin_of(p) + p.rank * each * TILE_KEYS;
    p.end = p.first + each * TILE_KEYS < p.context ? p.first + each * TILE_KEYS : p.context;
    return p;
}

// Addresses in the launch's dynamic shared memory.
struct SharedMemoryLayout {
    Barrier* records_full;
    float *received, *records;  // records of all blocks (in the first block); records of this block's warps
    KV* rings;
};
DEV SharedMemoryLayout shared_layout() {
    DYN_SHARED(u8, shared);
    float* received = (float*)(shared + BARRIER_BYTES);
    float* records = received + BLOCKS * HEAD_GROUP * RECORD;
    return SharedMemoryLayout{(Barrier*)shared, received, records, (KV*)(records + WARPS * HEAD_GROUP * RECORD)};
}

// Progress of the tile loads of a warp; `at` is the first key of the next tile to load.
struct TileCursor {
    const KV* pool;  // tiles of this KV head in block 0 of the pool
    const i32* table;
    u32 at, end, block_values;
    u32 block;  // block-table entry of the next tile, loaded while the previous tile is fetched
};
DEV void load_block_entry(TileCursor& t) {
    if (t.at < t.end) t.block = (u32)t.table[t.at / BLOCK_TOKENS];
}
DEV void fetch_next(KvTileRing& ring, TileCursor& t) {
    if (t.at >= t.end) return fetch(ring, nullptr);
    fetch(ring, t.pool + (u64)t.block * t.block_values + t.at % BLOCK_TOKENS * D);
    t.at += WARPS * TILE_KEYS;
    load_block_entry(t);
}
DEV TileCursor tiles_of_warp(const SplitCursor& p, const KV* pool, u32 kv_heads) {
    const u32 head_values = 2 * BLOCK_TOKENS * D;
    TileCursor t{pool + p.head * head_values, p.table, p.first + warp_id() * TILE_KEYS, p.end, kv_heads * head_values,
                 0};
    load_block_entry(t);
    return t;
}
