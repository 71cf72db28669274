// attention_decode/run_splits.h - the warps of a block (a team) process a contiguous part of the list of all
// splits. KV tiles are prefetched across splits, heads and rows. The partial results of the warps are merged
// in shared memory; the splits of a head are merged by the block that finishes last.
#pragma once

// Output arrays of the kernel.
struct DecodeOutputs {
    half_t* o;
    float* partial;  // [rows, KV heads, max_splits, HEAD_GROUP, RECORD]
    u32* arrived;    // [rows, KV heads]
    u32 max_splits, stride, kv_heads;
#if SINKS
    const float* sinks;  // [query heads]
#endif
};

// The KV tile that the warp prefetches next, a few tiles after the tile that it processes.
struct PrefetchCursor {
    SplitCursor cursor;
    u32 at, end;  // current key, and end of the split
    u32 block;    // block-table entry of the tile, loaded while the previous tile is fetched
};

DEV void enter_split(PrefetchCursor& a) {
    a.at = first_key(a.cursor) + warp_id() * TILE_KEYS;
    a.end = end_key(a.cursor);
}

DEV void seek_tile(PrefetchCursor& a, const BatchMetadata& rows) {
    while (a.cursor.left != 0 && a.at >= a.end) {
        next_split(a.cursor, rows);
        if (a.cursor.left != 0) enter_split(a);
    }
    if (a.cursor.left == 0) return;
    a.block = (u32)load_scalar(rows.tables + (u64)a.cursor.table * rows.table_width + a.at / BLOCK_TOKENS);
}

DEV void fetch_next(KvTileRing& ring, PrefetchCursor& a, const BatchMetadata& rows, const KV* pool) {
    if (a.cursor.left == 0) return fetch(ring, nullptr);
    const u64 tile = (u64)a.block * (rows.kv_heads / KV_SHARERS) + a.cursor.head / KV_SHARERS;
    fetch(ring, pool + tile * 2 * BLOCK_TOKENS * D + a.at % BLOCK_TOKENS * D);
    a.at += WARPS * TILE_KEYS;
    seek_tile(a, rows);
}

// Progress of a warp through the splits of its block: current split, next tile to prefetch, ring buffer, and
// number of prefetched tiles.
struct SplitRunState {
    SplitCursor cursor;
    PrefetchCursor ahead;
    KvTileRing ring;
    u32 fetched;  // number of ring stages filled or left empty, at most TILES_AHEAD
};

// Prefetches the first KV tiles, up to the first tile that the previous kernel may still be writing; called
// before grid_wait().
DEV SplitRunState begin_run(const SplitCursor& cursor, const BatchMetadata& rows, KV* rings, const KV* pool) {
    SplitRunState run{cursor, {cursor, 0, 0, 0}, ring_of_warp(rings), 0};
    PrefetchCursor& a = run.ahead;
    if (cursor.left != 0) {
        enter_split(a);
        seek_tile(a, rows);
    }
#if WARP_SIZE == 32
    for (; run.fetched < TILES_AHEAD && a.cursor.left != 0 && !has_new_keys(a.at, a.cursor, rows); ++run.fetched)
        fetch_next(run.ring, a, rows, pool);
#endif
    return run;
}

// Addresses of the results of a KV head: its outputs, and the partial results of its splits. The partial
// results of a token have the same addresses whether or not other tokens are processed together with it.
struct HeadResultTarget {
    half_t* out;
    float* parts;
    u32 splits;  // splits of the head; 0: no head pending
    u32 tokens;
#if SINKS
    const float* sinks;  // [HEAD_GROUP] sinks of the query heads
#endif
};
DEV u32 token_of(u32 query) { return TOKENS_PER_BLOCK == 1 ? 0 : query / HEAD_GROUP; }
DEV u32 queries_of(const HeadResultTarget& t) {
    return TOKENS_PER_BLOCK == 1 ? (u32)HEAD_GROUP : t.tokens * HEAD_GROUP;
}
DEV half_t* output_of(const HeadResultTarget& t, const DecodeOutputs& to, u32 query) {
    return t.out + (u64)token_of(query) * to.stride + (query - token_of(query) * HEAD_GROUP) * D;
}
DEV u64 unit_values(const DecodeOutputs& to) { return (u64)to.max_splits * HEAD_GROUP * RECORD; }
DEV float* part_of(const HeadResultTarget& t, const DecodeOutputs& to, u32 query, u32 split) {
    return t.parts + token_of(query) * to.kv_heads * unit_values(to) + (split * HEAD_GROUP + query - token_of(query) * HEAD_GROUP) * RECORD;
}

// Stores output channels [d, d + 4) of one query, merged over all of its keys.
DEV void store_output(const HeadResultTarget& t, const DecodeOutputs& to, u32 query, u32 d, const MergedOutput& m) {
#if SINKS
    const float sum = with_sink(m.sum, m.max, t.sinks, query - token_of(query) * HEAD_GROUP);
#else
    const float sum = m.sum;
#endif
    half_x4 y;
    UNROLL for (u32 i = 0; i < 4; ++i) y.v[i] = to_half(m.value.v[i] / sum);
    *(half_x4*)(output_of(t, to, query) + d) = y;
}

// Merges the partial results (`records`) of all warps of the block. Stores the merged partial result of split
// `split` per query, or the output if the context has a single split.
DEV void merge_warps(const HeadResultTarget& t, const DecodeOutputs& to, u32 split, const float* records) {
    for (u32 i = tid(); i < queries_of(t) * QUADS; i += (u32)TEAM) {
        const u32 query = i / QUADS, d = i % QUADS * 4;
        const MergedOutput m = merge<WARPS>(records + query * RECORD, d, GROUP * RECORD);
        if (t.splits == 1) {
            store_output(t, to, query, d, m);
            continue;
        }
        float* part = part_of(t, to, query, split);
        *(f32x4*)(part + d) = m.value;
        if (d == 0) *(f32x2*)(part + D) = f32x2{{m.max, m.sum}};
    }
}

// Merges the partial results of all splits of a head, and stores the outputs. `records`: scratch shared
// memory, which no thread may still be reading.
DEV void merge_splits(const HeadResultTarget& t, const DecodeOutputs& to, float* records) {
    for (u32 query = warp_id() / SPREAD; query < queries_of(t); query += WARPS / SPREAD) {
        const u32 share = warp_id() % SPREAD;
        fold(records + (share * GROUP + query) * RECORD, part_of(t, to, query, 0), share, t.splits, HEAD_GROUP * RECORD);
    }
    wait_shared();
    team_sync();
    for (u32 i = tid(); i < queries_of(t) * QUADS; i += (u32)TEAM) {
        const u32 query = i / QUADS, d = i % QUADS * 4;
        store_output(t, to, query, d, merge<SPREAD>(records + query * RECORD, d, GROUP * RECORD));
    }
    if (SETS == 1) team_sync();  // The next split overwrites the records.
}

// Merges the splits of `head` if this block was the last to finish splits of `head`. A barrier must have
// followed count_arrival(). `records`: scratch shared memory, which no thread may still be reading.
DEV void finish_split(HeadResultTarget& head, const DecodeOutputs& to, float* records) {
    if (head.splits != 0 && was_last()) {
        merge_splits(head, to, records);
        if (SETS == 2) team_sync();  // The next split overwrites these records.
    }
    head.splits = 0;
}

// Called after the last split of `head` that this block processes; `done` is the number of splits of `head`
// that this block has processed. If these are all splits of the head, merges them; otherwise counts them as
// finished.
DEV void finish_head(HeadResultTarget& shared, const HeadResultTarget& head, const DecodeOutputs& to, u32* arrived,
                     u32 done, float* records) {
#if FROM_QKV  // Mostly one split per block, so there is no later split to overlap with.
    if (is_last(arrived, done, head.splits)) merge_splits(head, to, records);
#else
    publish();
    if (done == head.splits) return merge_splits(head, to, records);
    count_arrival(arrived, done, head.splits);
    shared = head;
#endif
}

DEV u64 unit_of(const SplitCursor& p, const BatchMetadata& rows) { return (u64)p.row * rows.kv_heads + p.head; }
DEV HeadResultTarget target_of(const SplitCursor& p, const BatchMetadata& rows, const DecodeOutputs& to) {
    half_t* out = to.o + (u64)p.token * to.stride + p.head * HEAD_GROUP * D;
    float* parts = to.partial + unit_of(p, rows) * unit_values(to);
#if SINKS
    return HeadResultTarget{out, parts, p.splits, p.count, to.sinks + p.head * HEAD_GROUP};
#else
    return HeadResultTarget{out, parts, p.splits, p.count};
#endif
}

// Replaces the scores `s` of the tile that begins at key `at` by probabilities. Keys from `end` on, the end
// of the split, are masked.
DEV void softmax_tile(SoftmaxState& r, ScoreFragment& s, const SplitCursor& p, u32 at, u32 end, float factor) {
    u32 seen[SLOTS];
    UNROLL for (u32 i = 0; i < SLOTS; ++i)
        seen[i] = TOKENS_PER_BLOCK == 1 ? end - at : keys_seen_by(p, query_of(i) / HEAD_GROUP, at, end);
    online_softmax(r, s, seen, factor);
}

#include "attention_decode/mask_first_keys.h"

#if WARP_SIZE == 64
// Returns the address of the tile at `a`, and begins to load the block-table entry of the tile after it. After the last
// tile of the warp in the split, that is the first entry of the split, and not used.
DEV const KV* advance_tile(PrefetchCursor& a, const BatchMetadata& rows, const KV* pool) {
    const u64 tile = (u64)uniform(a.block) * (rows.kv_heads / KV_SHARERS) + a.cursor.head / KV_SHARERS;
    const KV* keys = pool + tile * 2 * BLOCK_TOKENS * D + a.at % BLOCK_TOKENS * D;
    a.at += WARPS * TILE_KEYS;
    const u32 next = a.at < a.end ? a.at : first_key(a.cursor);
    a.block = (u32)rows.tables[(u64)a.cursor.table * rows.table_width + next / BLOCK_TOKENS];
    return keys;
}

// Processes the tiles of the current split of this warp. The next tile, which may be in another split, is loaded while
// a tile is processed; after the last tile of the run, a tile that is in the same KV block.
DEV void multiply_tiles(SoftmaxState& r, QueryOperand& mine, SplitRunState& run, const BatchMetadata& rows,
                        const KV* pool, float factor) {
    const SplitCursor& p = run.cursor;
    PrefetchCursor& a = run.ahead;
    const u32 end = end_key(p);
    pin(mine);
    for (u32 at = first_key(p) + warp_id() * TILE_KEYS; at < end;) {
        // The inner loop ends where the next tile is in another split.
        do {
            const KV* next = advance_tile(a, rows, pool);
            ScoreFragment s = score_loaded(run.ring, mine, next);
#if FIRST_POSITION || WINDOWED
            if (at == origin_of(p)) mask_first_keys(s.v, p, window_of(rows));
#endif
            softmax_tile(r, s, p, at, end, factor);
            add_values(r, s, loaded_values(run.ring, end - at, next));
            if (!REPLACES_VALUES) fetch_values(run.ring, next);
            at += WARPS * TILE_KEYS;
        } while (at < end && a.at < a.end);
        if (a.at >= a.end) seek_tile(a, rows);
    }
}
#endif

// Processes all splits of this block; called after grid_wait(). `records`: SETS * SET floats of shared memory
// for the partial results of the warps.
DEV void finish_run(SplitRunState run, const QueryKeySource& source, const BatchMetadata& rows, const KV* pool,
                    float* records, const DecodeOutputs& to, float factor) {
    SplitCursor& p = run.cursor;
    float* const first_records = records;
    for (; run.fetched < TILES_AHEAD; ++run.fetched) fetch_next(run.ring, run.ahead, rows, pool);
    QueryOperand mine{};
    HeadResultTarget target{}, shared{};  // current head; earlier head shared with other teams, not yet merged
    u32 done = 0;  // number of splits of the current head that are done
    while (p.left != 0) {
        begin_split(source, mine, p, done == 0);
        if (done == 0) target = target_of(p, rows, to);
        SoftmaxState r;
        start(r);
#if WARP_SIZE == 64
        multiply_tiles(r, mine, run, rows, pool, factor);
#else
        for (u32 at = first_key(p) + warp_id() * TILE_KEYS, end = end_key(p); at < end; at += WARPS * TILE_KEYS) {
            await_tile();
            complete_tile(source, run.ring, p, at);
#if LATE_VALUES
            const KeyOperand k = stored_keys(run.ring);
#else
            KeyOperand k;
            ValueOperand v;
            load_tile(run.ring, end - at, k, v);
            fetch_next(run.ring, run.ahead, rows, pool);
#endif
            ScoreFragment s = score(mine, k);
#if FIRST_POSITION || WINDOWED
            if (at == origin_of(p)) mask_first_keys(s.v, p, window_of(rows));
#endif
            softmax_tile(r, s, p, at, end, factor);
#if LATE_VALUES
            add_stored_values(r, s, run.ring, end - at);
            fetch_next(run.ring, run.ahead, rows, pool);
#else
            add_values(r, s, v);
#endif
        }
#endif
        finish(r);
        put(r, records + warp_id() * GROUP * RECORD);
        team_sync();
        if (p.context == 0) {
            for (u32 i = tid(); i < HEAD_GROUP * D; i += TEAM) target.out[i] = to_half(0.f);
        } else {
            merge_warps(target, to, p.split, records);
        }
        if (SETS == 1) team_sync();  // The next split overwrites the records.
        float* const others = SETS == 1 || records != first_records ? first_records : records + SET;
        finish_split(shared, to, others);
        ++done;
        const bool last_of_head = p.left == 1 || p.split + 1 == p.splits;
        if (last_of_head && p.splits > 1) finish_head(shared, target, to, to.arrived + unit_of(p, rows), done, records);
        records = others;
        if (last_of_head) done = 0;
        next_split(p, rows);
    }
    if (shared.splits != 0) team_sync();
    finish_split(shared, to, first_records);
}
