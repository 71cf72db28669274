// mla_decode: means of latents, weighted by softmax(scale q · row) over the paged pool, of all heads: latent attention
// between its two products by matrices of heads (mla_head_gemm). CPU twin: cpu/mla/absorbed_attention.rs.
//
// A block has 16 heads of a token, or of each of TOGETHER successive tokens of a request, which share every row of the pool that it
// fetches; a token's warps have the scores of 16 keys each, then a share of the channels of all keys of a step (step.h). A context is cut into splits of
// split_keys(context) keys; blocks take equal runs of the list of all splits (attention_decode/split_schedule.h), fetch steps ahead
// across them, and merge the splits of a (row, 16 heads) in the last block to arrive, splits ascending. The cuts depend on
// the row's own context and on nothing else. Blocks of other heads take the same runs at the same time, so that a row of the
// pool comes from memory once.
// Rows that are successive tokens of a request, by their tables and contexts, are taken together if they are cut alike, which changes
// no bit of any.
// With EACH_TOKEN rows have any number of tokens: a block takes a run of TOGETHER of them and all keys that they see (token.h).
//
// Contexts and tables are read before grid_wait(), as attention_decode says.
//
//   means [T, heads * LATENT]; taken: queries at the latents, the same, and perhaps the same memory
//   q [T, q_stride], of whose heads' `query` channels the last ROTARY are turned
//   pool: one layer, [slot][LATENT + ROTARY]; all half_t
//   tables   i32 [S, table_width]; row r reads table table_rows[r], or table r without table_rows
//   partial  f32 [splits of all rows, tiles of heads, heads of a tile, RECORD]: sums of latents, then maximum and sum; any contents
//   arrived  u32 [rows, tiles of heads], zero; zero again afterwards
//
//   -DLATENT=128|256|512  -DROTARY=n (a multiple of 32)  -DBLOCK_TOKENS=n (a multiple of 16)
//   -DSTAGES=n steps in the ring  -DEACH_TOKEN=0|1  -DUNSEEN=n positions that nobody sees, and where nobody asks
//   -DTOGETHER=1|2 tokens
// Grid: (any number of runs, tiles of heads), best as many blocks as run at once; EACH_TOKEN: (runs of tokens from `first` on, tiles
// of heads). Block: TEAM.
// Dynamic shared memory: STAGES * KEYS * LINE * 2 bytes.
//
// Rounding: probabilities to half_t, the mean once. Roofline: 2 context (LATENT + ROTARY) bytes a row.
#include "dev.h"
#include "dev/strip.h"

#ifndef EACH_TOKEN
#  define EACH_TOKEN 0
#endif
#ifndef UNSEEN
#  define UNSEEN 0
#endif
#ifndef TOGETHER
#  define TOGETHER 1
#endif
enum : u32 {
    TILE = 16,  // keys of a warp in a step; heads of a block
    TILES = WARP_SIZE == 64 ? 2 : 4,
    KEYS = TILES * TILE,
    HALVES = WARP_SIZE == 64 ? 1 : 2,  // warps that share the scores of a tile
    TOKEN_WARPS = TILES * HALVES,
    WARPS = TOGETHER * TOKEN_WARPS,
    TEAM = WARPS * WARP_SIZE,
    WIDTH = LATENT + ROTARY,
    SPREAD_RUNS = 1,   // splits of single tokens for each block up to which they are taken one by one (split_schedule.h)
    CUT_TOGETHER = 0,  // what others see of a context does not change how it is cut
    LINE = WIDTH + 8  // elements from row to row in shared memory: no two of eight meet in a bank
};
DEV void team_sync() { sync(); }
DEV u32 own_token() { return warp_id() / TOKEN_WARPS; }
DEV u32 warp_of_token() { return warp_id() % TOKEN_WARPS; }
DEV u32 tile_of_warp() { return warp_of_token() % TILES; }
DEV u32 half_of_warp() { return warp_of_token() / TILES; }
DEV u32 first_head() { return bid_y() * TILE; }

// Keys of a split: what ends one, and merges it, costs as much as some 60 keys. The twin of `SPLITS` in
// kernels/src/gpu/mla_decode.rs.
DEV u32 split_keys(u32 context) {
    return context <= 2048 ? 256 : context <= 8192 ? 512 : context <= 32768 ? 1024 : 4096;
}
DEV u32 splits_of_keys(u32 context, u32) {
    const u32 keys = split_keys(context);
    return (context + keys - 1) / keys;
}
DEV u32 even_split(u32 context, u32) { return split_keys(context); }

#include "attention_decode/split_schedule.h"
#include "attention_decode/last_block.h"
#include "mla_decode/token.h"
#include "mla_decode/ring.h"
#include "mla_decode/step.h"
#include "mla_decode/merge.h"

// Strides are in elements.
KERNEL(TEAM)
mla_decode(half_t* means, float* partial, u32* arrived, const half_t* taken, const half_t* q, const half_t* pool,
           const i32* cu_q, const i32* context_lens, const i32* tables, const i32* table_rows, u32 row_count,
           u32 heads, u32 query, u32 table_width, u32 first, u32 q_stride, float factor) {
    DYN_SHARED(half_t, shared);
    const Rows rows{context_lens, cu_q, tables, table_rows, row_count, 1, table_width, nullptr, TOGETHER, 0};
    Place p = EACH_TOKEN ? first_token(rows, first) : start_of_block(rows);
    grid_wait();
    grid_release();
    Ring ring = begin_ring(shared, p, rows, pool);
    const Source source{taken, q, heads, query, q_stride};
    const Outputs to{means, partial, arrived, heads};
    Queries mine{};
    u32 done = 0;  // splits of these heads
    while (p.left != 0) {
        if (done == 0) mine = load_queries(source, p);
        Running r;
        start(r);
        for (u32 at = first_key(p), end = end_key(p); at < end; at += KEYS) {
            const half_t* step = next_step(ring, rows, pool);
            weigh(r, score(mine, step), at, keys_seen_by(p, own_token(), at, end), factor);
            add_compressed_kv(r, step);
        }
        finish(r);
        put(r, p, to);
        ++done;
        const bool leaving = p.left == 1 || p.split + 1 == p.splits;
        if (leaving && p.splits > 1 && is_last(to.arrived + unit_of(p), done, p.splits)) merge_splits(p, to);
        if (leaving) done = 0;
        next_place(p, rows);
    }
}
EXPORT(mla_decode)
