// attention_decode: o [T, N D] = softmax(scale q Kᵀ) V for rows of one query, over the paged pool.
// CPU twin: `paged_attention`. Rows with context 0 write zeros.
//
// The queries of a KV head share every key they load. A context is cut into splits of split_keys(context) keys, and a
// block takes an equal run of the list of all splits (walk.h). Its waves take tiles of 16 keys in turn, fetched ahead
// across splits, heads and rows (ring.h), and merge in shared memory, waves ascending; splits merge in the last block to
// arrive, in an order that their number fixes (merge.h). The cuts depend on the row's own context and on nothing else,
// and the grid decides only who computes what: a row gives the same bits in any batch, in any grid, captured or not.
//
// Contexts, tables and all keys but the row's last tile are fetched before grid_wait(), while earlier kernels still run:
// what wrote them must be followed, before this kernel, by one that releases its successor after its own grid_wait().
// A step's embedding or first norm does, behind `prepare`; the keys are those of steps before.
//
//   pool     [block][KV head][K tile | V tile] of this layer, tiles [BLOCK_TOKENS][D]
//   tables   i32 [S, table_width]; row r reads table table_rows[r], or table r without table_rows
//   partial  f32 [rows, KV heads, max_splits, HEAD_GROUP, RECORD]: outputs, then maximum and sum; any contents
//   arrived  u32 [rows, KV heads], zero; zero again afterwards
//   max_splits at least the splits of any row
//
//   -DHEAD_DIM=64|128  -DBLOCK_TOKENS=n (a multiple of 16)  -DHEAD_GROUP=1..16 query heads per KV head  -DKV_FP8=0|1
//   -DSTAGES=n tiles in a wave's ring; waves of 64 lanes have none
// Grid: any number of blocks, best as many as run at once. Block: WAVES waves.
// Dynamic shared memory: RING_BYTES + SETS * SET * 4 bytes.
//
// Rounding: probabilities to bf16, the output once. Roofline: 2 context D bytes a row and KV head, twice with bf16.
#include "dev.h"

#ifndef KV_FP8
#  define KV_FP8 0
#endif
// Few queries on narrow waves: the keys make the rows of the products.
#define KEYS_FIRST (WAVE == 32 && HEAD_GROUP <= 8 && !KV_FP8)
#if KEYS_FIRST
#  include "attention_decode/keys_first.h"
#else
#  include "attention/wave.h"
// One lane of those that share a query.
DEV bool speaks_for_query() { return strip_k() == 0; }
// Calls put(query, channel, value) for each output of the lane.
template <class Put> DEV void each_output(const Running& r, const Put& put) {
    UNROLL for (u32 p = 0; p < PARTS; ++p)
        UNROLL for (u32 j = 0; j < PART; ++j) put(query_of(part_slot(p)), part_channel(p) + j, PART_VALUE(r.out, p, j));
}
DEV void weigh(Running& r, Scores& s, u32 seen, float factor) {
    const u32 all[2] = {seen, seen};
    weigh(r, s, all, factor);
}
#endif

#ifndef STAGES
#  define STAGES 3
#endif
enum : u32 { WAVES = 4, TILES_AHEAD = WAVE == 64 ? 1 : STAGES };

#include "attention_decode/walk.h"
#include "attention_decode/ring.h"
#include "attention_decode/merge.h"

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

// Whether the kernel before this one may still be writing into the tile.
DEV bool is_fresh(const Ahead& a) { return a.at + TILE_KEYS >= a.place.context; }

DEV void fetch_next(Ring& ring, Ahead& a, const Rows& rows, const KV* pool) {
    if (a.place.left == 0) return fetch(ring, nullptr);
    const u64 tile = (u64)a.block * rows.kv_heads + a.place.head;
    fetch(ring, pool + tile * 2 * BLOCK_TOKENS * D + a.at % BLOCK_TOKENS * D);
    a.at += WAVES * TILE_KEYS;
    settle(a, rows);
}

DEV void store_output(bf16* o, const Merged& m) {
    bf16x4 y;
    UNROLL for (u32 i = 0; i < 4; ++i) y.v[i] = to_bf16(m.value.v[i] / m.sum);
    *(bf16x4*)o = y;
}

// The records of the block's waves as one per query: the output itself if the context has no other split.
DEV void merge_waves(bf16* out, float* part, const float* records, bool only) {
    for (u32 i = tid(); i < HEAD_GROUP * QUADS; i += bdim()) {
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
DEV void merge_splits(bf16* out, float* records, const float* parts, u32 splits) {
    for (u32 query = wave() / SPREAD; query < HEAD_GROUP; query += WAVES / SPREAD) {
        const u32 share = wave() % SPREAD;
        fold(records + (share * HEAD_GROUP + query) * RECORD, parts + query * RECORD, share, splits, HEAD_GROUP * RECORD);
    }
    sync();
    for (u32 i = tid(); i < HEAD_GROUP * QUADS; i += bdim())
        store_output(out + i * 4, merge<SPREAD>(records + i / QUADS * RECORD, i % QUADS * 4, HEAD_GROUP * RECORD));
    if (SETS == 1) sync();  // The next split writes the records again.
}

// Whether this block, which brings `done` splits of a head, is the last to bring some. Every thread must come.
DEV bool is_last(u32* arrived, u32 done, u32 splits) {
    SHARED(u32, last, 1);
#if !DEV_NV  // There, what a barrier has ordered before an atomic operation of one thread, that operation publishes.
    fence();
#endif
    sync();
    if (done == splits) return true;
    if (tid() == 0) {
        last[0] = atomic_add_acq_rel(arrived, done) + done == splits;
        if (last[0]) arrived[0] = 0;
    }
    sync();
#if !DEV_NV
    fence();
#endif
    return last[0];
}

KERNEL(WAVES* WAVE)
attention_decode(bf16* o, float* partial, u32* arrived, const bf16* q, const KV* pool, const i32* cu_q,
                 const i32* context_lens, const i32* tables, const i32* table_rows, u32 row_count, u32 kv_heads,
                 u32 table_width, u32 max_splits, u32 q_stride, u32 o_stride, float factor) {
    DYN_SHARED(u8, shared);
    float* first_records = (float*)(shared + RING_BYTES);
    float* records = first_records;
    const Rows rows{context_lens, cu_q, tables, table_rows, row_count, kv_heads, table_width};
    Place p = start_of_block(rows);
    Ahead ahead{p, 0, 0, 0};
    Ring ring = ring_of_wave((KV*)shared);
    u32 fetched = 0;
    if (p.left != 0) {
        enter_split(ahead);
        settle(ahead, rows);
    }
    for (; fetched < TILES_AHEAD && ahead.place.left != 0 && !is_fresh(ahead); ++fetched) fetch_next(ring, ahead, rows, pool);
    grid_wait();
    grid_release();
    for (; fetched < TILES_AHEAD; ++fetched) fetch_next(ring, ahead, rows, pool);

    Queries mine{};
    bf16* out = o;
    u32 done = 0;  // splits of this head
    while (p.left != 0) {
        if (done == 0) {
            const bf16* queries = q + (u64)p.token * q_stride + p.head * HEAD_GROUP * D;
            mine = load_queries([&](u32 query) { return query < HEAD_GROUP ? queries + query * D : nullptr; });
            out = o + (u64)p.token * o_stride + p.head * HEAD_GROUP * D;
        }
        Running r;
        start(r);
        for (u32 at = first_key(p) + wave() * TILE_KEYS, end = end_key(p); at < end; at += WAVES * TILE_KEYS) {
            Keys k;
            Values v;
            take(ring, end - at, k, v);
            fetch_next(ring, ahead, rows, pool);
            Scores s = score(mine, k);
            weigh(r, s, end - at, factor);
            add_values(r, s, v);
        }
        finish(r);
        put(r, records + wave() * HEAD_GROUP * RECORD);
        sync();
        const u64 unit = (u64)p.row * kv_heads + p.head;
        float* parts = partial + unit * max_splits * HEAD_GROUP * RECORD;
        if (p.context == 0) {
            for (u32 i = tid(); i < HEAD_GROUP * D; i += bdim()) out[i] = to_bf16(0.f);
        } else {
            merge_waves(out, parts + p.split * HEAD_GROUP * RECORD, records, p.splits == 1);
        }
        if (SETS == 1) sync();  // The next split writes the records again.
        ++done;
        const bool leaving = p.left == 1 || p.split + 1 == p.splits;
        if (leaving && p.splits > 1 && is_last(arrived + unit, done, p.splits)) merge_splits(out, records, parts, p.splits);
        if (SETS == 2) records = records == first_records ? records + SET : first_records;
        if (leaving) done = 0;
        next_split(p, rows);
    }
}
EXPORT(attention_decode)
