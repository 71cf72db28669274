// mla_decode: MLA decode, absorbed: for each head, the average of the compressed KV rows in the paged pool,
// weighted by softmax(scale q · row). It runs between the two per-head GEMMs with W_UK and W_UV
// (mla_head_gemm). CPU reference: cpu/mla/absorbed_attention.rs.
//
// A block processes 16 heads of one token, or of TOKENS_PER_BLOCK successive tokens of a request. All of them
// share every pool row that the block loads; a token's warps compute the scores of 16 keys each, then
// accumulate a part of the channels over all keys of a step (step.h). A context is cut into splits of
// split_keys(context) keys. Each block processes an equal part of the list of all splits
// (attention_decode/split_schedule.h) and prefetches steps across splits. The block that finishes last merges
// the splits of a row and 16 heads, in ascending order of splits. The splits of a row depend only on its
// context length. Blocks that process other heads process the same splits at the same time, so that a row of
// the pool is read from memory once. Rows that are successive tokens of a request (detected from their block
// tables and context lengths) are processed together if they have the same splits; this does not change
// results. With EACH_TOKEN rows have any number of tokens: a block processes a run of TOKENS_PER_BLOCK tokens
// and all keys that they attend to (token.h).
//
// Context lengths and block tables are read before grid_wait(); attention_decode.hip states the condition
// under which this is allowed.
//
//   means [tokens, heads * KV_LORA_RANK]  outputs
//   absorbed_q  queries absorbed by W_UK, with the shape of `means`; may be the same memory
//   q [tokens, q_stride]  query projection, `query` channels per head, of which the last QK_ROPE_HEAD_DIM
//   have RoPE applied
//   pool  KV pool of one layer, [slot][KV_LORA_RANK + QK_ROPE_HEAD_DIM]; all half_t
//   tables   block tables, i32 [sequence slots, table_width]; row r reads table table_rows[r], or table r if
//            table_rows is null
//   partial  f32 [splits of all rows, tiles of heads, heads of a tile, RECORD]: weighted sums, then maximum
//            and sum; need not be initialised
//   arrived  u32 [rows, tiles of heads], zero before and after the launch
//
//   -DKV_LORA_RANK=128|256|512  -DQK_ROPE_HEAD_DIM=n (a multiple of 32)  -DBLOCK_TOKENS=n (a multiple of 16)
//   -DSTAGES=n pipeline stages  -DEACH_TOKEN=0|1  -DFIRST_POSITION=n masks keys at positions below n; no query
//                           is at one of them
//   -DTOKENS_PER_BLOCK=1|2 tokens per block
//   -DSPLIT_DIVISOR=2 halves the keys per split, on GPUs with twice the compute units of an H200
// Grid: (any number of runs, tiles of heads); the number of resident blocks is fastest. With EACH_TOKEN:
// (runs of tokens from `first` on, tiles of heads). Block: TEAM.
// Dynamic shared memory: STAGES * KEYS * LINE * 2 bytes.
//
// Rounding: probabilities to half_t; the output once. Roofline: 2 context (KV_LORA_RANK + QK_ROPE_HEAD_DIM)
// bytes per row.
#include "dev.h"
#include "dev/strip.h"

#ifndef EACH_TOKEN
#  define EACH_TOKEN 0
#endif
#ifndef FIRST_POSITION
#  define FIRST_POSITION 0
#endif
#ifndef TOKENS_PER_BLOCK
#  define TOKENS_PER_BLOCK 1
#endif
#ifndef SPLIT_DIVISOR
#  define SPLIT_DIVISOR 1
#endif
enum : u32 {
    MIN_SPLIT_KEYS = 128,
    TILE = 16,  // keys per warp and step; heads per block
    TILES = WARP_SIZE == 64 ? 2 : 4,
    KEYS = TILES * TILE,
    HALVES = WARP_SIZE == 64 && KV_LORA_RANK < 512 ? 1 : 2,  // number of warps that share the channels of a tile's scores
    TOKEN_WARPS = TILES * HALVES,
    WARPS = TOKENS_PER_BLOCK * TOKEN_WARPS,
    TEAM = WARPS * WARP_SIZE,
    WIDTH = KV_LORA_RANK + QK_ROPE_HEAD_DIM,
    MAX_SEPARATE_SPLITS = 1,  // rows are scheduled separately up to this number of splits per block
    GROUP_SPLIT_LENGTH = 0,  // the split length of a row depends on its own context only
    // Row stride in shared memory, in elements: eight rows have no bank conflicts; 64 lanes: as KEY_PADDING of attention/warp.h. Must
    // match `ROW_PADDING` and `WAVEFRONT64_ROW_PADDING` in kernels/src/gpu/mla_decode.rs.
    LINE = WIDTH + (WARP_SIZE == 64 ? 16 : 8)
};
DEV void team_sync() { sync(); }
DEV u32 own_token() { return warp_id() / TOKEN_WARPS; }
DEV u32 warp_of_token() { return warp_id() % TOKEN_WARPS; }
DEV u32 tile_of_warp() { return warp_of_token() % TILES; }
DEV u32 half_of_warp() { return warp_of_token() / TILES; }
DEV u32 first_head() { return bid_y() * TILE; }

// Returns the number of keys per split. Finishing and merging a split takes as long as processing about 60
// keys. Must match `SPLITS` in kernels/src/gpu/mla_decode.rs.
DEV u32 split_keys(u32 context) {
    const u32 measured = context <= 2048 ? 256 : context <= 8192 ? 512 : context <= 32768 ? 1024 : 4096;
    const u32 keys = measured / SPLIT_DIVISOR;
    return keys < MIN_SPLIT_KEYS ? (u32)MIN_SPLIT_KEYS : keys;
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

// Arguments whose names end in `stride` are in elements.
KERNEL(TEAM)
mla_decode(half_t* means, float* partial, u32* arrived, const half_t* absorbed_q, const half_t* q, const half_t* pool,
           const i32* cu_q, const i32* context_lens, const i32* tables, const i32* table_rows, u32 row_count,
           u32 heads, u32 query, u32 table_width, u32 first, u32 q_stride, float factor) {
    DYN_SHARED(half_t, shared);
    const BatchMetadata rows{context_lens, cu_q, tables, table_rows, row_count, 1, table_width, nullptr,
                             TOKENS_PER_BLOCK, 0};
    SplitCursor p = EACH_TOKEN ? first_token(rows, first) : start_of_block(rows);
    grid_wait();
    grid_launch_dependents();
    KvStageRing ring = begin_ring(shared, p, rows, pool);
    const MlaQuerySource source{absorbed_q, q, heads, query, q_stride};
    const MlaDecodeOutputs to{means, partial, arrived, heads};
    HeadQueryFragments mine{};
    u32 done = 0;  // number of splits of the current heads that are done
    while (p.left != 0) {
        if (done == 0) mine = load_queries(source, p);
        SoftmaxState r;
        start(r);
        for (u32 at = first_key(p), end = end_key(p); at < end; at += KEYS) {
            const half_t* step = next_step(ring, rows, pool);
            online_softmax(r, score(mine, step), at, keys_seen_by(p, own_token(), at, end), factor);
            add_compressed_kv(r, step);
        }
        finish(r);
        put(r, p, to);
        ++done;
        const bool last_split = p.left == 1 || p.split + 1 == p.splits;
        if (last_split && p.splits > 1 && is_last(to.arrived + unit_of(p), done, p.splits)) merge_splits(p, to);
        if (last_split) done = 0;
        advance_cursor(p, rows);
    }
}
EXPORT(mla_decode)
