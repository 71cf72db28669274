// attention_decode: o [T, N D] = softmax(scale q Kᵀ) V for rows of one query, over the paged pool.
// CPU twin: `paged_attention`. Rows with context 0 write zeros.
//
// The queries of a KV head share every key they load. A context is cut into splits of split_keys(context) keys; a
// block takes the splits bid_x, bid_x + gdim_x, ... of one row and KV head. Its waves take tiles of 16 keys in turn and
// merge in shared memory, waves ascending; splits merge in the last block to arrive, splits ascending. The cuts depend
// on the row's own context and on nothing else, and the grid decides only who computes what: a row gives the same bits
// in any batch, in any grid, captured or not.
//
//   pool     [block][KV head][K tile | V tile] of this layer, tiles [BLOCK_TOKENS][D]
//   tables   i32 [S, table_width]; row r reads table table_rows[r], or table r without table_rows
//   partial  f32 [rows, KV heads, max_splits, HEAD_GROUP, D + 2]: outputs, then maximum and sum; any contents
//   arrived  u32 [rows, KV heads], zero; zero again afterwards
//   max_splits at least the splits of any row
//
//   -DHEAD_DIM=64|128  -DBLOCK_TOKENS=n (a multiple of 16)  -DGROUP=1..16 query heads per KV head  -DKV_FP8=0|1
// Grid: (any, KV heads, rows). Block: a multiple of WAVE, at most 256.
// Dynamic shared memory: waves * HEAD_GROUP * (D + 2) * 4 bytes.
//
// Rounding: probabilities to bf16, the output once. Roofline: 2 context D bytes a row and KV head, twice with bf16.
#include "dev.h"
#include "attention/wave.h"

enum : u32 { RECORD = D + 2 };  // Outputs, maximum, sum of one query.

// Keys of a split. Short contexts are cut finely, to fill the device; long ones coarsely, to keep merging cheap.
// The twin of `split_keys` in kernels/src/hip/attention.rs.
DEV u32 split_keys(u32 context) {
    return context <= 2048 ? 128 : context <= 8192 ? 256 : context <= 32768 ? 512 : 1024;
}

struct Head {
    const KV* pool;
    const i32* table;
    u32 kv_heads, head;
};

DEV const KV* key_tile(const Head& h, u32 position) {
    const u64 block = (u64)(u32)h.table[position / BLOCK_TOKENS] * h.kv_heads + h.head;
    return h.pool + block * 2 * BLOCK_TOKENS * D + position % BLOCK_TOKENS * D;
}

DEV Running attend(const Queries& q, const Head& h, u32 from, u32 to, float factor) {
    Running r;
    start(r);
    const u32 step = bdim() / WAVE * TILE_KEYS;
    u32 at = from + wave() * TILE_KEYS;
    if (at < to) {
        const KV* tile = key_tile(h, at);
        Keys k = load_keys(tile, D);
        for (; at < to; at += step) {
            const u32 present = to - at;
            const Values v = load_values(tile + BLOCK_TOKENS * D, D, present);
            Scores s = score(q, k);
            if (at + step < to) {
                tile = key_tile(h, at + step);
                k = load_keys(tile, D);
            }
            const u32 seen[2] = {present, present};
            weigh(r, s, seen, factor);
            add_values(r, s, v);
        }
    }
    finish(r);
    return r;
}

// The wave's queries as records in shared memory.
DEV void put(const Running& r, float* records) {
    UNROLL for (u32 p = 0; p < PARTS; ++p) {
        const u32 query = query_of(part_slot(p));
        if (query < HEAD_GROUP)
            UNROLL for (u32 j = 0; j < PART; ++j) records[query * RECORD + part_channel(p) + j] = PART_VALUE(r.out, p, j);
    }
    UNROLL for (u32 i = 0; i < SLOTS; ++i) {
        if (query_of(i) >= HEAD_GROUP || strip_k() != 0) continue;  // One lane a query.
        records[query_of(i) * RECORD + D] = r.max[i];
        records[query_of(i) * RECORD + D + 1] = r.sum[i];
    }
}

struct Merged { float value, max, sum; };

// Channel d of one query over `count` records, `stride` apart.
DEV Merged merge(const float* records, u32 d, u32 count, u32 stride) {
    Merged m{0.f, NO_SCORE, 0.f};
    for (u32 i = 0; i < count; ++i) m.max = fmax_(m.max, records[i * stride + D]);
    for (u32 i = 0; i < count; ++i) {
        const float weight = exp2_(records[i * stride + D] - m.max);
        m.value = fma_(weight, records[i * stride + d], m.value);
        m.sum = fma_(weight, records[i * stride + D + 1], m.sum);
    }
    return m;
}

DEV void store_head(bf16* o, u32 i, const Merged& m) { o[i] = to_bf16(m.value / m.sum); }

KERNEL(256) attention_decode(bf16* o, float* partial, u32* arrived, const bf16* q, const KV* pool, const i32* cu_q,
                             const i32* context_lens, const i32* tables, const i32* table_rows, u32 kv_heads,
                             u32 table_width, u32 max_splits, u32 q_stride, u32 o_stride, float factor) {
    DYN_SHARED(float, records);
    SHARED(u32, last, 1);
    grid_wait();
    const u32 head = bid_y(), row = bid_z(), waves = bdim() / WAVE;
    const u32 context = (u32)context_lens[row], token = (u32)cu_q[row], table = table_rows ? (u32)table_rows[row] : row;
    const u32 span = split_keys(context), splits = (context + span - 1) / span;
    bf16* out = o + (u64)token * o_stride + head * HEAD_GROUP * D;
    if (context == 0) {
        if (bid_x() == 0)
            for (u32 i = tid(); i < HEAD_GROUP * D; i += bdim()) out[i] = to_bf16(0.f);
        return;
    }
    if (bid_x() >= splits) return;

    const bf16* queries = q + (u64)token * q_stride + head * HEAD_GROUP * D;
    const Queries mine = load_queries([&](u32 query) { return query < HEAD_GROUP ? queries + query * D : nullptr; });
    const Head keys{pool, tables + (u64)table * table_width, kv_heads, head};
    float* parts = partial + (u64)(row * kv_heads + head) * max_splits * HEAD_GROUP * RECORD;
    for (u32 split = bid_x(); split < splits; split += gdim_x()) {
        const u32 from = split * span, to = from + span < context ? from + span : context;
        put(attend(mine, keys, from, to, factor), records + wave() * HEAD_GROUP * RECORD);
        sync();
        for (u32 i = tid(); i < HEAD_GROUP * D; i += bdim()) {
            const u32 query = i / D, d = i % D;
            const Merged m = merge(records + query * RECORD, d, waves, HEAD_GROUP * RECORD);
            if (splits == 1) {
                store_head(out, i, m);
                continue;
            }
            float* part = parts + (split * HEAD_GROUP + query) * RECORD;
            part[d] = m.value;
            if (d == 0) {
                part[D] = m.max;
                part[D + 1] = m.sum;
            }
        }
        sync();  // The next split writes the records again.
    }
    if (splits == 1) return;

    fence();
    sync();
    const u32 blocks = splits < gdim_x() ? splits : gdim_x();
    if (tid() == 0) last[0] = atomic_add_acq_rel(arrived + row * kv_heads + head, 1) == blocks - 1;
    sync();
    if (!last[0]) return;
    fence();
    for (u32 i = tid(); i < HEAD_GROUP * D; i += bdim())
        store_head(out, i, merge(parts + i / D * RECORD, i % D, splits, HEAD_GROUP * RECORD));
    if (tid() == 0) arrived[row * kv_heads + head] = 0;
}
EXPORT(attention_decode)
