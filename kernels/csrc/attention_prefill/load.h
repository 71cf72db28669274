// attention_prefill/load.h - the producer warpgroup: loads the queries, keys and values of successive work
// items into WGMMA operand panels for the consumer warpgroups, as far ahead as pipeline stages are free.
// load_half.h and load_fp8.h load keys and values.
#pragma once
#include "dev/ring_stage.h"

enum : u32 {
    STAGES = 2,                      // pipeline stages of keys and of values
    ITEM_STAGES = KV_FP8 || D > 128 ? 1 : 2,  // pipeline stages of queries
    PANELS = D / 64,                 // panels (of 64 channels) per operand
    QUERY_PANEL_BYTES = TILE_PAIRS * 128,
    QUERY_BYTES = PANELS * QUERY_PANEL_BYTES,
    PANEL_BYTES = TILE * 128,        // of keys and of values
    OPERAND_BYTES = PANELS * PANEL_BYTES,
    OUTPUT_BYTES = D > 128 ? 0 : QUERY_BYTES,  // buffer of outputs; larger heads store them from registers
    // Two buffers of the partial scores of both consumer warpgroups, if these divide the channels.
    PARTIAL_SCORE_BYTES = CHANNEL_GROUPS == 1 ? 0 : 2 * CHANNEL_GROUPS * TILE_PAIRS * TILE * 4,
    STAGED_BYTES = KV_FP8 ? TILE * D : 0,  // buffer of fp8 keys or values before conversion to half_t
    PRODUCER_WARPS = 4,              // warps of the producer warpgroup
    QUERY_WARPS = KV_FP8 ? 4 : 2,    // number of producer warps, the last ones, that load queries
    ROW_WARPS = KV_FP8 ? 4 : 1,      // producer warps that load keys; as many load values
    CONSUMER_WARPS = 8               // warps of the consumer warpgroups
};

// Barriers (full and empty) of the pipeline stages of one operand.
struct StageBarriers { Barrier full[STAGES], empty[STAGES]; };
// Barriers between producer and consumer warps, and the current work items, which the producer passes to the
// consumers.
struct PipelineBarriers {
    StageBarriers items, keys, values;  // items: work items with their queries
    Barrier tail_full;               // arrival of the values of a step of which rows are cleared
    Barrier sequence[2];             // ordering barrier between the two consumer warpgroups
    Barrier partial_scores;          // arrival of the partial scores of both consumer warpgroups
    WorkTile item[STAGES];
    u32 next[2];                     // index of the next item
};
// Addresses in the launch's dynamic shared memory.
struct SharedMemoryLayout { u8 *queries, *keys, *values, *outputs, *staged, *partial_scores; };

DEV SharedMemoryLayout shared_layout(u8* dynamic) {
    u8* panels = align_1024(dynamic);
    u8 *keys = panels + ITEM_STAGES * QUERY_BYTES, *values = keys + STAGES * OPERAND_BYTES;
    u8* outputs = values + STAGES * OPERAND_BYTES;
    u8* staged = outputs + OUTPUT_BYTES;
    return SharedMemoryLayout{panels, keys, values, outputs, staged, staged + 2 * STAGED_BYTES};
}

// Copies the queries of a tile to shared memory; rows after the last (query, head) pair of the tile are
// zero-filled.
DEV void fetch_queries(u8* operand, const PrefillParams& job, const WorkTile& item) {
    constexpr u32 PIECES = D / 8, ROWS_PER_PASS = QUERY_WARPS * WARP_SIZE / PIECES;
    const u32 thread = tid() - (PRODUCER_WARPS - QUERY_WARPS) * WARP_SIZE, piece = thread % PIECES;
    const half_t* q = job.q + (u64)item.token * job.q_stride + item.head * HEAD_GROUP * D + piece * 8;
    _Pragma("unroll 4") for (u32 i = 0; i < TILE_PAIRS; i += ROWS_PER_PASS) {
        const u32 row = i + thread / PIECES, pair = item.first + row < item.pairs ? item.first + row : 0;
        u8* to = operand + piece / 8 * QUERY_PANEL_BYTES + panel_offset(row, piece % 8);
        cp_async16_zfill(to, q + (u64)(pair / HEAD_GROUP) * job.q_stride + pair % HEAD_GROUP * D, item.first + row < item.pairs);
    }
    cp_async_commit();
    cp_async_wait<0>();
}

// Loads the queries of a work item into shared memory and signals the item to the consumer warpgroups.
DEV void publish_item(const SharedMemoryLayout& shared, PipelineBarriers* m, PipelineState& pipe,
                      const PrefillParams& job, const WorkTile& item) {
    barrier_wait(&m->items.empty[pipe.stage], pipe.phase ^ 1);
    if (warp_id() == PRODUCER_WARPS - 1 && lane() == 0) m->item[pipe.stage] = item;
    if (item.pairs != 0) fetch_queries(shared.queries + pipe.stage * QUERY_BYTES, job, item);
    release_written(&m->items.full[pipe.stage]);
    advance<ITEM_STAGES>(pipe);
}

// Draws work items from the counter until none is left and calls fetch(item) for each item; finally calls
// fetch() with an empty item, which ends the loops of the consumers.
template <class Fetch> DEV void each_item(PipelineBarriers* m, const PrefillParams& job, const Fetch& fetch) {
    WorkTileSearch search{};
    u32 number = bid_x();
    for (u32 phase = 0;; phase ^= 1) {
        const WorkTile item = find(search, job, number);
        const bool leader = tid() == 0;
        if (item.pairs == 0) {
            fetch(item);
            // Each block that has a work item increments the counter once to get its next item, so the
            // counter is incremented as often as there are items. The block that gets the highest value was
            // the last to increment the counter, and resets it to 0.
            const u32 numbers = search.items_before;
            if (leader && number >= gdim_x() && number - gdim_x() + 1 == numbers) atomic_add(job.work_counter, 0u - numbers);
            return;
        }
        const u32 ticket = leader ? atomic_add(job.work_counter, 1u) : 0;
        fetch(item);
        if (leader) m->next[phase] = gdim_x() + ticket;
        named_barrier_sync<1>(PRODUCER_WARPS * WARP_SIZE);
        number = m->next[phase];
    }
}
