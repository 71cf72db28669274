// mla_prefill/fetch.h - the producer warp: issues TMA copies of the queries, keys and values of successive
// work items into WGMMA operand panels for the two consumer warpgroups, as far ahead as pipeline stages are
// free.
#pragma once
#include "dev/ring_stage.h"

enum : u32 {
    STAGES = 2,                            // pipeline stages of keys and of values
    OWN_PANELS = QK_NOPE_HEAD_DIM / 64,            // panels of a key's qk_nope part
    KEY_PANELS = (QK_NOPE_HEAD_DIM + QK_ROPE_HEAD_DIM) / 64,
    VALUE_PANELS = VALUE / 64,
    PANEL_BYTES = TILE * 128,
    KEY_BYTES = KEY_PANELS * PANEL_BYTES,  // keys of a step, or queries of a tile
    VALUE_BYTES = VALUE_PANELS * PANEL_BYTES,
    CONSUMER_WARPS = 8                     // consumer warps
};

// Barriers (full and empty) of the pipeline stages of one operand.
struct StageBarriers { Barrier full[STAGES], empty[STAGES]; };
// Barriers between producer and consumer warps, and the current work item, which the producer passes to the
// consumers.
struct PipelineBarriers {
    StageBarriers keys, values;
    Barrier item_full, item_empty;  // barriers of a work item with its queries
    Barrier sequence[2];            // ordering barrier between the two consumer warpgroups
    WorkTile item;
};
// Addresses in the launch's dynamic shared memory.
struct SharedMemoryLayout { u8 *queries, *keys, *values, *outputs; };

DEV SharedMemoryLayout shared_layout(u8* dynamic) {
    u8 *queries = align_1024(dynamic), *keys = queries + KEY_BYTES, *values = keys + STAGES * KEY_BYTES;
    return SharedMemoryLayout{queries, keys, values, values + STAGES * VALUE_BYTES};
}

// Loads the queries of a work item and signals the item to the consumer warpgroups. If the tile extends
// beyond the last token of its row, it also contains queries of other rows or zeros, whose results are not
// stored.
DEV void publish_item(const SharedMemoryLayout& shared, PipelineBarriers* m, PipelineState& pipe,
                      const MlaPrefillParams& job, const WorkTile& item) {
    barrier_wait(&m->item_empty, pipe.phase ^ 1);
    if (lane() == 0) {
        m->item = item;
        if (has_keys_here(item)) {
            const HalfMatrixView q{job.q, job.tokens, job.q_stride};
            barrier_expect(&m->item_full, KEY_BYTES);
            for (u32 panel = 0; panel < KEY_PANELS; ++panel)
                panel_copy(shared.queries + panel * PANEL_BYTES, job.q_map, q, TILE, item.token + item.first,
                           item.head * (QK_NOPE_HEAD_DIM + QK_ROPE_HEAD_DIM) + panel * 64, &m->item_full);
        } else {
            barrier_arrive(&m->item_full);
        }
    }
    warp_sync();
    advance<1>(pipe);
}

DEV void fetch_step(const SharedMemoryLayout& shared, PipelineBarriers* m, const PipelineState& pipe,
                    const MlaPrefillParams& job, const WorkTile& item, u32 row) {
    const HalfMatrixView kv{job.kv, job.window.keys, job.kv_stride};
    u8 *keys = shared.keys + pipe.stage * KEY_BYTES, *values = shared.values + pipe.stage * VALUE_BYTES;
    Barrier *keys_full = &m->keys.full[pipe.stage], *values_full = &m->values.full[pipe.stage];
    barrier_wait(&m->keys.empty[pipe.stage], pipe.phase ^ 1);
    if (lane() == 0) {
        barrier_expect(keys_full, KEY_BYTES);
        for (u32 panel = 0; panel < KEY_PANELS; ++panel) {
            const u32 own = item.head * QK_NOPE_HEAD_DIM + panel * 64, shared_by_heads = job.rope_column + (panel - OWN_PANELS) * 64;
            panel_copy(keys + panel * PANEL_BYTES, job.kv_map, kv, TILE, row, panel < OWN_PANELS ? own : shared_by_heads,
                       keys_full);
        }
    }
    barrier_wait(&m->values.empty[pipe.stage], pipe.phase ^ 1);
    if (lane() == 0) {
        barrier_expect(values_full, VALUE_BYTES);
        for (u32 panel = 0; panel < VALUE_PANELS; ++panel)
            panel_copy(values + panel * PANEL_BYTES, job.kv_map, kv, TILE, row,
                       job.values + item.head * VALUE + panel * 64, values_full);
    }
    warp_sync();
}

// Loop of the producer warp: draws work items from the counter and loads their operands until no item is
// left, then sends an empty item, which ends the loops of the consumer warpgroups.
DEV void fetch_all(const SharedMemoryLayout& shared, PipelineBarriers* m, const MlaPrefillParams& job) {
    WorkTileSearch search{};
    PipelineState items{}, steps{};
    for (u32 number = bid_x();;) {
        const WorkTile item = find(search, job, number);
        if (item.tokens == 0) {
            publish_item(shared, m, items, job, item);
            // Each block that has a work item increments the counter once to get its next item, so the
            // counter is incremented as often as there are items. The block that gets the highest value was
            // the last to increment the counter, and resets it to 0.
            const u32 numbers = search.items_before;
            if (lane() == 0 && number >= gdim_x() && number - gdim_x() + 1 == numbers) atomic_add(job.work_counter, 0u - numbers);
            return;
        }
        const u32 ticket = lane() == 0 ? atomic_add(job.work_counter, 1u) : 0;
        if (has_keys_here(item) || item.range.steps == 0) publish_item(shared, m, items, job, item);
        for (u32 step = item.range.step; step < item.range.end; ++step, advance<STAGES>(steps))
            fetch_step(shared, m, steps, job, item, item.range.at + (step - item.range.step) * TILE);
        number = gdim_x() + shfl(ticket, 0);
    }
}
