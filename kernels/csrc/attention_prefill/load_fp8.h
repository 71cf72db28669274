// attention_prefill/load_fp8.h - keys and values of an fp8 pool, converted to half_t while loading, which is
// exact. All four producer warps load keys, values and queries. A thread copies vectors of 16 channels to its
// own staging buffer in shared memory. When the pipeline stage is free, the thread converts the vectors and
// stores them in the WGMMA operand panels (dev/wgmma.h), while the copies of the next step are in flight.
#pragma once
#include "attention_prefill/load.h"

enum : u32 {
    PRODUCER_THREADS = PRODUCER_WARPS * WARP_SIZE,
    ROW_PIECES = 4,  // number of fp8 pieces of a row in a panel
    ROWS_PER_PASS = PRODUCER_THREADS / (ROW_PIECES * PANELS),
    PASSES = TILE / ROWS_PER_PASS,
    NO_ROW = ~0u     // key that the tile does not attend to: its pieces are zero-filled
};
static_assert(PRODUCER_THREADS >= TILE, "a thread finds a key");

// Row, panel, and 16-channel vector in the panel row, that this thread copies in each pass. Eight consecutive
// threads copy the vectors of two rows, which are in different shared memory banks.
DEV u32 own_row(u32 pass) { return pass * ROWS_PER_PASS + tid() / (8 * PANELS) * 2 + tid() / ROW_PIECES % 2; }
DEV u32 own_panel() { return tid() / 8 % PANELS; }
DEV u32 own_piece() { return tid() % ROW_PIECES; }

// Returns the row index in the KV pool of key at + tid() (one key per thread, for the step that begins at key
// `at`); NO_ROW if that key is beyond the step or the context, or before the first key of the tile.
DEV u32 pool_row(const PrefillParams& job, const WorkTile& item, const i32* table, u32 at, u32 context) {
    const u32 position = at + tid();
    if ((TILE < PRODUCER_THREADS && tid() >= TILE) || position >= context || position < first_key(item)) return NO_ROW;
    const u32 block = (u32)table[position / BLOCK_TOKENS];
    return (block * (job.kv_heads / KV_SHARERS) + item.head / KV_SHARERS) * 2 * BLOCK_TOKENS + position % BLOCK_TOKENS;
}

// Starts the copies of this thread for one step: keys at the rows `rows` of the KV pool, or the values of
// these keys if `values` is true.
DEV void start_pieces(u8* staged, const PrefillParams& job, const u32* rows, bool values) {
    const KV* channels = job.pool + own_panel() * 64 + own_piece() * 16;
    _Pragma("unroll 1") for (u32 pass = 0; pass < PASSES; ++pass) {
        const u32 key = rows[own_row(pass)];
        const u64 row = key == NO_ROW ? 0 : key + (values ? BLOCK_TOKENS : 0);
        cp_async16_zfill(staged + (pass * PRODUCER_THREADS + tid()) * 16, channels + row * D, key != NO_ROW);
    }
}

// widen_pieces() converts the fp8 vectors that this thread has copied to half_t, and stores them in the WGMMA
// operand panels.
struct Fp8x8Pair { fp8x8 v[2]; };
DEV void widen_pieces(u8* operand, const u8* staged) {
    u8* panel = operand + own_panel() * PANEL_BYTES;
    _Pragma("unroll 2") for (u32 pass = 0; pass < PASSES; ++pass) {
        const Fp8x8Pair piece = bits_as<Fp8x8Pair>(*(const fp8x16*)(staged + (pass * PRODUCER_THREADS + tid()) * 16));
        // Converts through f32, because with widen_half() to f16 the registers of the WGMMAs spill to local
        // memory.
        UNROLL for (u32 half = 0; half < 2; ++half)
            *(half_x8*)(panel + panel_offset(own_row(pass), own_piece() * 2 + half)) = narrow(widen(piece.v[half]));
    }
}

// State of the loads of one operand (keys or values): panels, staging buffer, barriers, and current pipeline
// stage.
struct ProducerState { u8 *operands, *staged; StageBarriers* stages; PipelineState pipe; };
// Converts the keys, or with `values` the values, of one step into their WGMMA operand panels and signals the
// consumers. Then starts the copies of the next step. `next`: rows of the KV pool with the keys of the next
// step; null if there is no next step. One cp.async group that was issued later may still be pending.
DEV void load_step(ProducerState& producer, const PrefillParams& job, const u32* next, bool values) {
    cp_async_wait<1>();
    barrier_wait(&producer.stages->empty[producer.pipe.stage], producer.pipe.phase ^ 1);
    widen_pieces(producer.operands + producer.pipe.stage * OPERAND_BYTES, producer.staged);
    release_written(&producer.stages->full[producer.pipe.stage]);
    advance<STAGES>(producer.pipe);
    if (next) start_pieces(producer.staged, job, next, values);
    cp_async_commit();
}

DEV void fetch_all(const SharedMemoryLayout& shared, PipelineBarriers* m, const PrefillParams& job) {
    SHARED(u32, rows, 2 * PRODUCER_THREADS);
    ProducerState keys{shared.keys, shared.staged, &m->keys, {}},
        values{shared.values, shared.staged + STAGED_BYTES, &m->values, {}};
    PipelineState items{};
    each_item(m, job, [&](const WorkTile& item) {
        if (item.steps == 0) return publish_item(shared, m, items, job, item);
        const i32* table = table_of(job, item.row);
        const u32 context = item.before + item.pairs / HEAD_GROUP;
        const u32 begin = first_step(item);
        u32* first_rows = rows + begin % 2 * PRODUCER_THREADS;
        // The earlier contents of `rows` may be overwritten: all threads have passed a barrier since reading
        // them.
        first_rows[tid()] = pool_row(job, item, table, begin * TILE, context);
        u32 ahead = pool_row(job, item, table, (begin + 1) * TILE, context);
        named_barrier_sync<1>(PRODUCER_THREADS);
        start_pieces(keys.staged, job, first_rows, false);
        cp_async_commit();
        start_pieces(values.staged, job, first_rows, true);
        cp_async_commit();
        for (u32 step = begin; step < item.steps; ++step) {
            u32* next = step + 1 < item.steps ? rows + (step + 1) % 2 * PRODUCER_THREADS : nullptr;
            if (next) next[tid()] = ahead;
            named_barrier_sync<1>(PRODUCER_THREADS);
            ahead = pool_row(job, item, table, (step + 2) * TILE, context);
            load_step(keys, job, next, false);
            if (step == begin) publish_item(shared, m, items, job, item);
            load_step(values, job, next, true);
        }
    });
}
