// attention_decode/run.h - a team of waves takes its run of the list of splits: tiles are fetched ahead across splits, heads
// and rows; waves merge in shared memory, splits in the last team to arrive.
#pragma once

// Where results go.
struct Outputs {
    half_t* o;
    float* partial;  // [rows, KV heads, max_splits, HEAD_GROUP, RECORD]
    u32* arrived;    // [rows, KV heads]
    u32 max_splits, stride;
};

// The wave's next tile to fetch: it runs ahead of the one that is multiplied.
struct Ahead {
    Place place;
    u32 at, end;  // keys of the split
    u32 block;    // of the tile, loaded one tile early
};

DEV void enter_split(Ahead& a) {
    a.at = first_key(a.place) + wave() * TILE_KEYS;
    a.end = end_key(a.place);
}

DEV void settle(Ahead& a, const Rows& rows) {
    while (a.place.left != 0 && a.at >= a.end) {
        next_split(a.place, rows);
        if (a.place.left != 0) enter_split(a);
    }
    if (a.place.left != 0) a.block = (u32)rows.tables[(u64)a.place.table * rows.table_width + a.at / BLOCK_TOKENS];
}

DEV void fetch_next(Ring& ring, Ahead& a, const Rows& rows, const KV* pool) {
    if (a.place.left == 0) return fetch(ring, nullptr);
    const u64 tile = (u64)a.block * rows.kv_heads + a.place.head;
    fetch(ring, pool + tile * 2 * BLOCK_TOKENS * D + a.at % BLOCK_TOKENS * D);
    a.at += WAVES * TILE_KEYS;
    settle(a, rows);
}

// What a team holds of its run.
struct Run {
    Place place;
    Ahead ahead;
    Ring ring;
    u32 fetched;  // tiles on their way, or places left empty, of TILES_AHEAD
};

// Fetches what needs no waiting for the kernel in front.
DEV Run begin_run(const Place& place, const Rows& rows, KV* rings, const KV* pool) {
    Run run{place, {place, 0, 0, 0}, ring_of_wave(rings), 0};
    Ahead& a = run.ahead;
    if (place.left != 0) {
        enter_split(a);
        settle(a, rows);
    }
    for (; run.fetched < TILES_AHEAD && a.place.left != 0 && !is_fresh(a.at, a.place.context); ++run.fetched)
        fetch_next(run.ring, a, rows, pool);
    return run;
}

DEV void store_output(half_t* o, const Merged& m) {
    half_x4 y;
    UNROLL for (u32 i = 0; i < 4; ++i) y.v[i] = to_half(m.value.v[i] / m.sum);
    *(half_x4*)o = y;
}

// The records of the team's waves as one per query: the output itself if the context has no other split.
DEV void merge_waves(half_t* out, float* part, const float* records, bool only) {
    for (u32 i = tid(); i < HEAD_GROUP * QUADS; i += (u32)TEAM) {
        const u32 query = i / QUADS, d = i % QUADS * 4;
        const Merged m = merge<WAVES>(records + query * RECORD, d, HEAD_GROUP * RECORD);
        if (only) {
            store_output(out + i * 4, m);
            continue;
        }
        *(f32x4*)(part + query * RECORD + d) = m.value;
        if (d == 0) *(f32x2*)(part + query * RECORD + D) = f32x2{{m.max, m.sum}};
    }
}

// All splits of a head. Nobody uses `records`.
DEV void merge_splits(half_t* out, float* records, const float* parts, u32 splits) {
    for (u32 query = wave() / SPREAD; query < HEAD_GROUP; query += WAVES / SPREAD) {
        const u32 share = wave() % SPREAD;
        fold(records + (share * HEAD_GROUP + query) * RECORD, parts + query * RECORD, share, splits, HEAD_GROUP * RECORD);
    }
    team_sync();
    for (u32 i = tid(); i < HEAD_GROUP * QUADS; i += (u32)TEAM)
        store_output(out + i * 4, merge<SPREAD>(records + i / QUADS * RECORD, i % QUADS * 4, HEAD_GROUP * RECORD));
    if (SETS == 1) team_sync();  // The next split writes the records again.
}

// A head of which this team has brought some splits and others bring the rest.
struct Shared {
    half_t* out;
    const float* parts;
    u32 splits;  // of the head; 0: there is no such head
};

// Merges the head if this team was the last to bring splits of it. A barrier has followed announce(); nobody uses `records`.
DEV void conclude(Shared& head, float* records) {
    if (head.splits != 0 && was_last()) {
        merge_splits(head.out, records, head.parts, head.splits);
        if (SETS == 2) team_sync();  // The next split writes these records.
    }
    head.splits = 0;
}

// This team has brought `done` splits of a head and brings no more.
DEV void leave(Shared& shared, const Shared& head, u32* arrived, u32 done, float* records) {
#if FROM_QKV  // One split a block, mostly: nothing to wait behind.
    if (is_last(arrived, done, head.splits)) merge_splits(head.out, records, head.parts, head.splits);
#else
    publish();
    if (done == head.splits) return merge_splits(head.out, records, head.parts, head.splits);
    announce(arrived, done, head.splits);
    shared = head;
#endif
}

// Once the kernel in front has ended. `records`: SETS * SET floats of shared memory.
DEV void finish_run(Run run, const Source& source, const Rows& rows, const KV* pool, float* records, const Outputs& to,
                    float factor) {
    Place& p = run.place;
    float* const first_records = records;
    for (; run.fetched < TILES_AHEAD; ++run.fetched) fetch_next(run.ring, run.ahead, rows, pool);
    Queries mine{};
    half_t* out = to.o;
    Shared shared{};
    u32 done = 0;  // splits of this head
    while (p.left != 0) {
        begin_split(source, mine, p, done == 0);
        if (done == 0) out = to.o + (u64)p.token * to.stride + p.head * HEAD_GROUP * D;
        Running r;
        start(r);
        for (u32 at = first_key(p) + wave() * TILE_KEYS, end = end_key(p); at < end; at += WAVES * TILE_KEYS) {
            Keys k;
            Values v;
            await_tile();
            complete_tile(source, run.ring, p, at);
            take(run.ring, end - at, k, v);
            fetch_next(run.ring, run.ahead, rows, pool);
            Scores s = score(mine, k);
            weigh(r, s, end - at, factor);
            add_values(r, s, v);
        }
        finish(r);
        put(r, records + wave() * HEAD_GROUP * RECORD);
        team_sync();
        const u64 unit = (u64)p.row * rows.kv_heads + p.head;
        float* parts = to.partial + unit * to.max_splits * HEAD_GROUP * RECORD;
        if (p.context == 0) {
            for (u32 i = tid(); i < HEAD_GROUP * D; i += TEAM) out[i] = to_half(0.f);
        } else {
            merge_waves(out, parts + p.split * HEAD_GROUP * RECORD, records, p.splits == 1);
        }
        if (SETS == 1) team_sync();  // The next split writes the records again.
        float* const others = SETS == 1 || records != first_records ? first_records : records + SET;
        conclude(shared, others);
        ++done;
        const bool leaving = p.left == 1 || p.split + 1 == p.splits;
        if (leaving && p.splits > 1) leave(shared, Shared{out, parts, p.splits}, to.arrived + unit, done, records);
        records = others;
        if (leaving) done = 0;
        next_split(p, rows);
    }
    if (shared.splits != 0) team_sync();
    conclude(shared, first_records);
}
