// mla_decode_wgmma: MLA decode, absorbed, with WGMMA: for each head, the average of the compressed KV rows in
// the paged pool, weighted by softmax(scale q · row). A block processes 64 heads of a token, or all heads of
// as many tokens of a request as fit into 64 query rows. CPU reference: cpu/mla/absorbed_attention.rs.
//
// A block has three warpgroups. The first warpgroup computes the scores and probabilities of a step (KEYS
// keys), and accumulates the first half of the channels. The second warpgroup accumulates the second half,
// with the probabilities that the first warpgroup writes to shared memory. The third warpgroup loads
// (fetch.h). The score MMAs of a step overlap with the accumulation of the previous step. Blocks that process
// other heads process the same parts of the list of splits at the same time, so that a row of the pool is
// read from memory once. Rows that are successive tokens of a request are processed together if they have the
// same number of splits (attention_decode/split_schedule.h); each uses the scores of the keys that it attends
// to. The split length is chosen for all rows of a step (split_length.h): storing the result of a split takes
// as long as several steps, and a block with more splits than others delays the whole kernel.
//
//   means, partial, arrived, absorbed_q, q, tables, table_rows, -DEACH_TOKEN  as in mla_decode
//   most_records  capacity of `partial` in splits, per tile of heads; at least row_count
//   pool, pool_map   KV pool of one layer, [slot][KV_LORA_RANK + QK_ROPE_HEAD_DIM]; its TMA descriptor as a
//                    matrix, with boxes of 16 rows
//
//   -DKV_LORA_RANK=128|256|512  -DQK_ROPE_HEAD_DIM=n (a multiple of 64)  -DBLOCK_TOKENS=n (a multiple of 16)
//   tokens_per_group  maximum number of tokens processed together; at most 64 / heads, or 1
// NVIDIA from sm_90 on. Grid: (runs, tiles of heads); the number of SMs is fastest. With EACH_TOKEN blocks
// process every gdim_x()-th run of tokens_per_group tokens from `first` on (mla_decode/token.h). Block: 384.
// Dynamic shared memory: GROUPS_SHARED bytes.
//
// Rounding: probabilities to half_t; the output once. Roofline: 2 context (KV_LORA_RANK + QK_ROPE_HEAD_DIM)
// bytes per row, or 2 context (2 KV_LORA_RANK + QK_ROPE_HEAD_DIM) operations per row and head.
#include "dev.h"
#include "dev/tensor_map.h"
#include "dev/ring_stage.h"

#ifndef EACH_TOKEN
#  define EACH_TOKEN 0
#endif
enum : u32 {
    TILE = 64,  // query rows of a block: (token, head) pairs
    KEYS = 64,  // keys per step
    WARPS = 8,  // consumer warps
    TEAM = WARPS * WARP_SIZE,
    PRODUCER_WARPS = 4,  // producer warps; each loads 16 rows of a step
    WIDTH = KV_LORA_RANK + QK_ROPE_HEAD_DIM,
    HALF = KV_LORA_RANK / 2,  // channels accumulated per warpgroup
    STAGES = 2,
    PANELS = WIDTH / 64,
    PANEL_BYTES = KEYS * 128,  // a panel of keys, of queries, or of probabilities
    OPERAND_BYTES = PANELS * PANEL_BYTES,
    MAX_SEPARATE_SPLITS = 0,  // split_length.h decides whether rows are scheduled separately
    GROUP_SPLIT_LENGTH = 1,  // all rows of a group use the split length of its last row
    PIPELINE_BARRIER_BYTES = 128,  // barriers, at the start of shared memory
    GROUPS_SHARED = PIPELINE_BARRIER_BYTES + (1 + STAGES) * OPERAND_BYTES + PANEL_BYTES + 1024
};
// Barrier of the consumer warps.
DEV void team_sync() { named_barrier_sync<1>(TEAM); }
DEV u32 first_head() { return bid_y() * TILE; }

DEV u32 splits_of_keys(u32 context, u32 split_log2) { return (context + (1u << split_log2) - 1) >> split_log2; }
// Returns the number of keys per split if a context is cut into `splits` splits: a multiple of KEYS, equal
// for all splits except the last, which may be shorter.
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

// Arguments whose names end in `stride` are in elements.
KERNEL_ALONE(384)
mla_decode_wgmma(half_t* means, float* partial, u32* arrived, const half_t* absorbed_q, const half_t* q, const half_t* pool,
                 TENSOR_MAP pool_map, const i32* cu_q, const i32* context_lens, const i32* tables, const i32* table_rows,
                 u32 row_count, u32 heads, u32 query, u32 table_width, u32 most_records, u32 first, u32 tokens_per_group, u32 q_stride,
                 float factor) {
    DYN_SHARED(u8, dynamic);
    PipelineBarriers* pipeline = (PipelineBarriers*)dynamic;
    const SharedMemoryLayout shared = shared_layout(dynamic);
    SHARED(SplitCursor, begin, 1);
    const BatchMetadata rows{context_lens, cu_q, tables, table_rows, row_count, 1, table_width, nullptr,
                             tokens_per_group, 0};
    if (tid() == 0) init_barriers(pipeline);
    set_queries(heads);
    sync();
    u32 with_keys = row_count;
    if (warp_id() < WARPS) {
        SplitCursor p;
        if (EACH_TOKEN) {
            p = first_token(rows, first);
        } else {
            BatchMetadata scheduled_rows = rows;
            const u32 split_log2 = choose_split_length(scheduled_rows, heads < TILE ? heads : TILE, most_records, (u32*)shared.queries);
            with_keys = scheduled_rows.rows;
            p = start_of_block(scheduled_rows, split_log2);
        }
        if (tid() == 0) *begin = p;
    }
    sync();
    grid_wait();
    grid_launch_dependents();
    const MlaDecodeParams job{rows, {means, partial, arrived, heads}, absorbed_q, q, pool, &pool_map, query, q_stride,
                              factor};
    if (warp_id() >= WARPS) {
        reg_dealloc<56>();
        fetch_all(job, shared, pipeline, *begin);
    } else {
        reg_alloc<224>();
        if (!EACH_TOKEN) store_padding(job, with_keys);
        multiply(job, shared, pipeline, *begin);
    }
}
EXPORT(mla_decode_wgmma)
