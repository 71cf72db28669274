// mla_decode_wgmma: mla_decode by warpgroups: means of latents, weighted by softmax(scale q · row) over the paged pool, of 64
// heads of a token at a time, or of all heads of as many tokens of a request as there is room for. CPU twin: cpu/mla/absorbed_attention.rs.
//
// Twelve warps: one warpgroup has the scores of a step's rows, makes probabilities of them, and adds up the first half of the
// channels; the second adds up the others, with the probabilities that the first one, which has them in registers, puts into shared memory; the warps of the
// third fetch (fetch.h). A step's scores are computed while the one before it is added up. Blocks of other heads take the same runs
// of the list of splits at the same time, so that a row of the pool comes from memory once.
// Rows that are successive tokens of a request are taken together if they have as many splits (attention_decode/split_schedule.h); each has the
// scores of the keys it sees. How long splits are is decided for all rows of a step (split_length.h): what a split
// leaves costs a block as much as several steps, and a block with more of them than others keeps all waiting.
//
//   means, partial, arrived, taken, q, tables, table_rows, -DEACH_TOKEN  as in mla_decode
//   most_records  splits that `partial` has room for, of each tile of heads; at least row_count
//   pool, pool_map   one layer, [slot][LATENT + ROTARY]; the same as a matrix, in boxes of 16 rows
//
//   -DLATENT=128|256|512  -DROTARY=n (a multiple of 64)  -DBLOCK_TOKENS=n (a multiple of 16)
//   together  tokens that are taken at once, at most; with all their heads no more than 64
// NVIDIA from sm_90 on. Grid: (runs, tiles of heads), best as many blocks as multiprocessors; EACH_TOKEN: blocks take every
// so-manieth run of `together` tokens from `first` on (mla_decode/token.h). Block: 384. Dynamic shared memory: GROUPS_SHARED bytes.
//
// Rounding: probabilities to half_t, the mean once. Roofline: 2 context (LATENT + ROTARY) bytes a row, or 2 context
// (2 LATENT + ROTARY) operations a row and head.
#include "dev.h"
#include "dev/tensor_map.h"
#include "dev/ring_stage.h"

#ifndef EACH_TOKEN
#  define EACH_TOKEN 0
#endif
enum : u32 {
    TILE = 64,  // heads of a block, all tokens
    KEYS = 64,  // of a step
    WARPS = 8,  // that multiply
    TEAM = WARPS * WARP_SIZE,
    FETCHING = 4,  // warps that fetch 16 rows of a step each
    WIDTH = LATENT + ROTARY,
    HALF = LATENT / 2,  // channels that a warpgroup adds up
    STAGES = 2,
    PANELS = WIDTH / 64,
    PANEL_BYTES = KEYS * 128,  // of keys, of queries, and of probabilities
    OPERAND_BYTES = PANELS * PANEL_BYTES,
    SPREAD_RUNS = 0,   // whether tokens are taken one by one is split_length.h's to say
    CUT_TOGETHER = 1,  // as the last of them is
    MEETING_BYTES = 128,  // barriers, in front
    GROUPS_SHARED = MEETING_BYTES + (1 + STAGES) * OPERAND_BYTES + PANEL_BYTES + 1024
};
// Of those that multiply.
DEV void team_sync() { some_sync<1>(TEAM); }
DEV u32 first_head() { return bid_y() * TILE; }

DEV u32 splits_of_keys(u32 context, u32 cut) { return (context + (1u << cut) - 1) >> cut; }
// All splits of a row are alike but for the last, which is shorter by less than a step for each of them.
DEV u32 even_split(u32 context, u32 splits) { return ((context + splits - 1) / splits + KEYS - 1) / KEYS * KEYS; }

#include "attention_decode/split_schedule.h"
#include "attention_decode/last_block.h"
#include "attention/softmax.h"
#include "mla_decode/records.h"
#include "mla_decode/token.h"

#include "mla_decode_wgmma/split_length.h"
#include "mla_decode_wgmma/store.h"
#include "mla_decode_wgmma/fetch.h"
#include "mla_decode_wgmma/multiply.h"

// Strides are in elements.
KERNEL_ALONE(384)
mla_decode_wgmma(half_t* means, float* partial, u32* arrived, const half_t* taken, const half_t* q, const half_t* pool,
                 TENSOR_MAP pool_map, const i32* cu_q, const i32* context_lens, const i32* tables, const i32* table_rows,
                 u32 row_count, u32 heads, u32 query, u32 table_width, u32 most_records, u32 first, u32 together, u32 q_stride,
                 float factor) {
    DYN_SHARED(u8, dynamic);
    Meeting* meeting = (Meeting*)dynamic;
    const Shared shared = share(dynamic);
    SHARED(Place, begin, 1);
    const Rows rows{context_lens, cu_q, tables, table_rows, row_count, 1, table_width, nullptr, together, 0};
    if (tid() == 0) open(meeting);
    set_queries(heads);
    sync();
    u32 with_keys = row_count;
    if (warp_id() < WARPS) {
        Place p;
        if (EACH_TOKEN) {
            p = first_token(rows, first);
        } else {
            Rows walked = rows;
            const u32 cut = cut_step(walked, heads < TILE ? heads : TILE, most_records, (u32*)shared.queries);
            with_keys = walked.rows;
            p = start_of_block(walked, cut);
        }
        if (tid() == 0) *begin = p;
    }
    sync();
    grid_wait();
    grid_release();
    const Job job{rows, {means, partial, arrived, heads}, taken, q, pool, &pool_map, query, q_stride, factor};
    if (warp_id() >= WARPS) {
        fewer_registers<56>();
        fetch_all(job, shared, meeting, *begin);
    } else {
        more_registers<224>();
        if (!EACH_TOKEN) leave_padding(job, with_keys);
        multiply(job, shared, meeting, *begin);
    }
}
EXPORT(mla_decode_wgmma)
