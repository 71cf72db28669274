// attention_prefill/load_half.h - keys and values of a half_t pool, loaded by TMA: one warp issues the copies
// of keys, a second warp issues the copies of values, and two warps load queries.
#pragma once
#include "attention_prefill/load.h"

// Whether the box of the keys from `position` on ends before the first key of the tile. Such boxes are not copied: their
// blocks may have been freed.
#if WINDOWED
DEV bool is_skipped(const WorkTile& item, u32 position) { return position + BOX_ROWS <= first_key(item); }
#else
DEV bool is_skipped(const WorkTile&, u32) { return false; }
#endif

// Returns the row index in the KV pool of key at + 16 * lane(), the first of 16 keys in one KV block;
// undefined if that key is beyond the context or in an earlier block than the first key of the tile.
DEV u32 pool_row(const PrefillParams& job, const WorkTile& item, const i32* table, u32 at, u32 context) {
    const u32 position = at + lane() * BOX_ROWS;
    const bool present = lane() < TILE / BOX_ROWS && position < context && !is_skipped(item, position);
    const u32 block = present ? (u32)table[position / BLOCK_TOKENS] : 0;
    return (block * (job.kv_heads / KV_SHARERS) + item.head / KV_SHARERS) * 2 * BLOCK_TOKENS + position % BLOCK_TOKENS;
}

// State of the warp that loads keys, or of the warp that loads values.
struct ProducerState { u8* operands; StageBarriers* stages; Barrier* tail_full; u32 tail_uses; PipelineState pipe; };

// Zeroes values [first, end) of a step, which are beyond the context or before the first key of the tile: they are
// multiplied by probabilities of zero, and NaN or infinity times zero would be NaN.
DEV void clear_rows(u8* operand, u32 first, u32 end) {
    for (u32 i = first * 8 + lane(); i < end * 8; i += WARP_SIZE)
        for (u32 panel = 0; panel < PANELS; ++panel)
            *(u32x4*)(operand + panel * PANEL_BYTES + i * 16) = u32x4{{0, 0, 0, 0}};
}

// Returns the number of boxes of the step at key `at` that are skipped, which are the first boxes.
DEV u32 skipped_boxes(const WorkTile& item, u32 at) {
    return first_key(item) > at ? (first_key(item) - at) / BOX_ROWS : 0;
}

template <bool VALUES> DEV void fetch_rows(ProducerState& producer, const PrefillParams& job, const WorkTile& item) {
    if (item.steps == 0) return;
    const i32* table = table_of(job, item.row);
    const u32 context = item.before + item.pairs / HEAD_GROUP;
    u32 row = pool_row(job, item, table, first_step(item) * TILE, context);
    for (u32 step = first_step(item); step < item.steps; ++step, advance<STAGES>(producer.pipe)) {
        const u32 at = step * TILE, stage = producer.pipe.stage, keys = context - at < TILE ? context - at : TILE;
        const u32 next = pool_row(job, item, table, at + TILE, context);
        const u32 boxes = (keys + BOX_ROWS - 1) / BOX_ROWS, skipped = skipped_boxes(item, at);
        const bool is_partial = VALUES && (keys < TILE || skipped != 0);
        u8* operand = producer.operands + stage * OPERAND_BYTES;
        Barrier* full = is_partial ? producer.tail_full : &producer.stages->full[stage];
        barrier_wait(&producer.stages->empty[stage], producer.pipe.phase ^ 1);
        if (lane() == 0) barrier_expect(full, (boxes - skipped) * PANELS * BOX_BYTES);
        warp_sync();
        if (lane() < boxes && lane() >= skipped)
            UNROLL for (u32 panel = 0; panel < PANELS; ++panel)
                box_copy(operand + panel * PANEL_BYTES + lane() * BOX_BYTES, job.pool_map, job.pool, D,
                         row + VALUES * BLOCK_TOKENS, panel * 64, full);
        if (is_partial) {
            barrier_wait(full, producer.tail_uses++ & 1);
            clear_rows(operand, 0, skipped * BOX_ROWS);
            clear_rows(operand, keys, TILE);
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
