// attention_prefill/load_fp8.h - keys and values of an fp8 pool, widened to half_t on their way, which is exact. All four warps
// bring both, and queries: a thread copies pieces of 16 channels to places of its own, and stores them in the panels once
// the step's turn has come, while those of the next step are on their way.
#pragma once
#include "attention_prefill/load.h"

enum : u32 {
    FETCHERS = FETCHING * WARP_SIZE,
    ROW_PIECES = 4,  // of a row in a panel
    AT_ONCE = FETCHERS / (ROW_PIECES * PANELS),
    PASSES = TILE / AT_ONCE,
    NO_ROW = ~0u     // behind the context: zeros
};
static_assert(FETCHERS == TILE, "a thread finds a key");

// A thread's piece: eight neighbours have those of two rows, whose places in a panel lie in different banks.
DEV u32 own_row(u32 pass) { return pass * AT_ONCE + tid() / (8 * PANELS) * 2 + tid() / ROW_PIECES % 2; }
DEV u32 own_panel() { return tid() / 8 % PANELS; }
DEV u32 own_piece() { return tid() % ROW_PIECES; }

// The row in the pool of a thread's key of those from `at` on.
DEV u32 pool_row(const Job& job, const Item& item, const i32* table, u32 at, u32 context) {
    const u32 position = at + tid();
    if (position >= context) return NO_ROW;
    const u32 block = (u32)table[position / BLOCK_TOKENS];
    return (block * job.kv_heads + item.head) * 2 * BLOCK_TOKENS + position % BLOCK_TOKENS;
}

// Starts copies of a thread's pieces of a step whose keys are at `rows`: of these, or of the values of the same positions.
DEV void start_pieces(u8* staged, const Job& job, const u32* rows, bool values) {
    const KV* channels = job.pool + own_panel() * 64 + own_piece() * 16;
    _Pragma("unroll 1") for (u32 pass = 0; pass < PASSES; ++pass) {
        const u32 key = rows[own_row(pass)];
        const u64 row = key == NO_ROW ? 0 : key + (values ? BLOCK_TOKENS : 0);
        copy16_or_zero(staged + (pass * FETCHERS + tid()) * 16, channels + row * D, key != NO_ROW);
    }
}

// What has come, into the panels.
struct Halves { fp8x8 v[2]; };
DEV void widen_pieces(u8* operand, const u8* staged) {
    u8* panel = operand + own_panel() * PANEL_BYTES;
    _Pragma("unroll 2") for (u32 pass = 0; pass < PASSES; ++pass) {
        const Halves piece = bits_as<Halves>(*(const fp8x16*)(staged + (pass * FETCHERS + tid()) * 16));
        // By way of f32: with widen_half of f16 the products' registers spill.
        UNROLL for (u32 half = 0; half < 2; ++half)
            *(half_x8*)(panel + panel_offset(own_row(pass), own_piece() * 2 + half)) = narrow(widen(piece.v[half]));
    }
}

// Keys or values of one step; then those of the next, if there is one, are started. One group of copies may be younger than theirs.
struct Way { u8 *operands, *staged; Stages* stages; RingStage turn; };
DEV void bring(Way& way, const Job& job, const u32* next, bool values) {
    copy_wait<1>();
    barrier_wait(&way.stages->free[way.turn.stage], way.turn.odd ^ 1);
    widen_pieces(way.operands + way.turn.stage * OPERAND_BYTES, way.staged);
    release_written(&way.stages->there[way.turn.stage]);
    advance<STAGES>(way.turn);
    if (next) start_pieces(way.staged, job, next, values);
    copy_commit();
}

DEV void fetch_all(const Shared& shared, Meeting* m, const Job& job) {
    SHARED(u32, rows, 2 * TILE);
    Way keys{shared.keys, shared.staged, &m->keys, {}}, values{shared.values, shared.staged + STAGED_BYTES, &m->values, {}};
    RingStage items{};
    each_item(m, job, [&](const Item& item) {
        if (item.steps == 0) return hand_over(shared, m, items, job, item);
        const i32* table = table_of(job, item.row);
        const u32 context = item.before + item.pairs / HEAD_GROUP;
        // What was in `rows` has been read: whoever is here has met the others since.
        rows[tid()] = pool_row(job, item, table, 0, context);
        u32 ahead = pool_row(job, item, table, TILE, context);
        some_sync<1>(FETCHERS);
        start_pieces(keys.staged, job, rows, false);
        copy_commit();
        start_pieces(values.staged, job, rows, true);
        copy_commit();
        for (u32 step = 0; step < item.steps; ++step) {
            u32* next = step + 1 < item.steps ? rows + (step + 1) % 2 * TILE : nullptr;
            if (next) next[tid()] = ahead;
            some_sync<1>(FETCHERS);
            ahead = pool_row(job, item, table, (step + 2) * TILE, context);
            bring(keys, job, next, false);
            if (step == 0) hand_over(shared, m, items, job, item);
            bring(values, job, next, true);
        }
    });
}
