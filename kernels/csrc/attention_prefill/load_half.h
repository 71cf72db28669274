// attention_prefill/load_half.h - keys and values of a half_t pool, loaded by TMA: one warp issues the copies
// of keys, a second warp issues the copies of values, and two warps load queries.
#pragma once
#include "attention_prefill/load.h"

// Returns the row index in the KV pool of key at + 16 * lane(), the first of 16 keys in one KV block;
// undefined if that key is beyond the context.
DEV u32 pool_row(const PrefillParams& job, const WorkTile& item, const i32* table, u32 at, u32 context) {
    const u32 position = at + lane() * BOX_ROWS;
    const u32 block = lane() < TILE / BOX_ROWS && position < context ? (u32)table[position / BLOCK_TOKENS] : 0;
    return (block * job.kv_heads + item.head) * 2 * BLOCK_TOKENS + position % BLOCK_TOKENS;
}

// State of the warp that loads keys, or of the warp that loads values.
struct ProducerState { u8* operands; StageBarriers* stages; Barrier* tail_full; u32 tail_uses; PipelineState pipe; };

// Zeroes the values of positions beyond the context: they are multiplied by probabilities of zero, and NaN or
// infinity times zero would be NaN.
DEV void clear_rows(u8* operand, u32 first) {
    for (u32 i = first * 8 + lane(); i < TILE * 8; i += WARP_SIZE)
        for (u32 panel = 0; panel < PANELS; ++panel)
            *(u32x4*)(operand + panel * PANEL_BYTES + i * 16) = u32x4{{0, 0, 0, 0}};
}

template <bool VALUES> DEV void fetch_rows(ProducerState& producer, const PrefillParams& job, const WorkTile& item) {
    if (item.steps == 0) return;
    const i32* table = table_of(job, item.row);
    const u32 context = item.before + item.pairs / HEAD_GROUP;
    u32 row = pool_row(job, item, table, 0, context);
    for (u32 step = 0; step < item.steps; ++step, advance<STAGES>(producer.pipe)) {
        const u32 at = step * TILE, stage = producer.pipe.stage, keys = context - at < TILE ? context - at : TILE;
        const u32 next = pool_row(job, item, table, at + TILE, context);
        const u32 boxes = (keys + BOX_ROWS - 1) / BOX_ROWS;
        const bool last = VALUES && keys < TILE;
        u8* operand = producer.operands + stage * OPERAND_BYTES;
        Barrier* full = last ? producer.tail_full : &producer.stages->full[stage];
        barrier_wait(&producer.stages->empty[stage], producer.pipe.phase ^ 1);
        if (lane() == 0) barrier_expect(full, boxes * PANELS * BOX_BYTES);
        warp_sync();
        if (lane() < boxes)
            UNROLL for (u32 panel = 0; panel < PANELS; ++panel)
                box_copy(operand + panel * PANEL_BYTES + lane() * BOX_BYTES, job.pool_map, job.pool, D,
                         row + VALUES * BLOCK_TOKENS, panel * 64, full);
        if (last) {
            barrier_wait(full, producer.tail_uses++ & 1);
            clear_rows(operand, keys);
            release_written(&producer.stages->full[stage]);
        }
        row = next;
    }
}

DEV void fetch_all(const SharedMemoryLayout& shared, PipelineBarriers* m, const PrefillParams& job) {
    if (warp_id() == 0) {
        ProducerState keys{shared.keys, &m->keys, nullptr, 0, {}};
        each_item(m, job, [&](const WorkTile& item) { fetch_rows<false>(keys, job, item); });
    } else if (warp_id() == 1) {
        ProducerState values{shared.values, &m->values, &m->tail_full, 0, {}};
        each_item(m, job, [&](const WorkTile& item) { fetch_rows<true>(values, job, item); });
    } else {
        PipelineState pipe{};
        each_item(m, job, [&](const WorkTile& item) { publish_item(shared, m, pipe, job, item); });
    }
}
