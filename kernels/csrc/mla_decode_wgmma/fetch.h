// mla_decode_wgmma/fetch.h - the producer warps: load the queries of each group of heads or tokens once, and
// rows of the KV pool step by step, into panels for the consumer warpgroups. They load ahead while stages are
// free.
#pragma once

struct Meeting {
    Barrier keys_there[STAGES], keys_free[STAGES];
    Barrier last_there[FETCHING];  // arrival of the last rows of a context, which do not fill a box
    Barrier queries_there, queries_free;
    Barrier weights_there, weights_free;  // probabilities of a step
};
static_assert(sizeof(Meeting) <= MEETING_BYTES, "panels begin behind it");
struct Shared { u8 *queries, *keys, *weights; };
struct Job {
    Rows rows;
    Outputs to;
    const half_t *absorbed_q, *q, *pool;
    const TensorMap* pool_map;
    u32 query, q_stride;
    float factor;
};

DEV void open(Meeting* m) {
    for (u32 i = 0; i < STAGES; ++i) {
        barrier_init(&m->keys_there[i], FETCHING);
        barrier_init(&m->keys_free[i], WARPS);
    }
    for (u32 i = 0; i < FETCHING; ++i) barrier_init(&m->last_there[i], 1);
    barrier_init(&m->queries_there, FETCHING);
    barrier_init(&m->queries_free, WARPS / 2);
    barrier_init(&m->weights_there, WARPS / 2);
    barrier_init(&m->weights_free, WARPS / 2);
    barriers_ready();
}

DEV Shared share(u8* dynamic) {
    u8* queries = on_1024(dynamic + MEETING_BYTES);
    u8* keys = queries + OPERAND_BYTES;
    return Shared{queries, keys, keys + STAGES * OPERAND_BYTES};
}

// Starts loading the queries of the tokens at `p`, 16 query rows per warp; zeros for heads and tokens that do
// not exist.
DEV void start_queries(const Job& job, const Shared& shared, const Place& p) {
    constexpr u32 PIECES = WIDTH / 8, OF_LATENT = KV_LORA_RANK / 8, HEADS = TILE / FETCHING;
    const u32 first = (warp_id() - WARPS) * HEADS;
    _Pragma("unroll 1") for (u32 row = first; row < first + HEADS; ++row) {
        const QueryRow asker = query_of(row, p, job.to);
        const bool real = asker.real;
        const u64 token = p.token + asker.token;
        const half_t* absorbed_q = job.absorbed_q + (token * job.to.heads + first_head() + asker.head) * KV_LORA_RANK;
        const half_t* rope_q = job.q + token * job.q_stride + (first_head() + asker.head + 1) * job.query - WIDTH;
        UNROLL for (u32 at = 0; at < PIECES; at += WARP_SIZE) {
            const u32 piece = at + lane();
            if (piece >= PIECES) break;
            u8* to = shared.queries + piece / 8 * PANEL_BYTES + panel_offset(row, piece % 8);
            copy16_or_zero(to, (real ? piece < OF_LATENT ? absorbed_q : rope_q : job.absorbed_q) + piece * 8 * real, real);
        }
    }
    copy_commit();
}

// State of a producer warp, which loads BOX_ROWS rows of every step.
struct Way {
    u32 block;  // block-table entry of its rows, loaded one step in advance
    u32 lasts;  // number of uses of last_there so far
    RingStage turn;
};

DEV u32 own_row() { return (warp_id() - WARPS) * BOX_ROWS; }
DEV u32 block_at(const Job& job, const Place& p, u32 key, u32 end) {
    return key < end ? (u32)job.rows.tables[(u64)p.table * job.rows.table_width + key / BLOCK_TOKENS] : 0;
}

// Zeroes rows beyond the context: they are multiplied by probabilities of zero, so they must be finite.
DEV void clear_rows(u8* rows, u32 first) {
    for (u32 i = first * 8 + lane(); i < BOX_ROWS * 8; i += WARP_SIZE)
        for (u32 panel = 0; panel < PANELS; ++panel) *(u32x4*)(rows + panel * PANEL_BYTES + i * 16) = u32x4{{0, 0, 0, 0}};
}

// Loads this warp's rows of keys [at, at + KEYS) of a split that ends at `end`.
DEV void fetch_step(const Job& job, const Shared& shared, Meeting* m, Way& way, u32 at, u32 end) {
    const u32 key = at + own_row(), stage = way.turn.stage;
    const u32 present = key >= end ? 0 : end - key < BOX_ROWS ? end - key : BOX_ROWS;
    u8* rows = shared.keys + stage * OPERAND_BYTES + own_row() * 128;
    Barrier *there = &m->keys_there[stage], *own = present == BOX_ROWS ? there : &m->last_there[warp_id() - WARPS];
    barrier_wait(&m->keys_free[stage], way.turn.odd ^ 1);
    if (present != 0) {
        if (lane() == 0) barrier_expect(own, PANELS * BOX_BYTES);
        warp_sync();
        if (lane() < PANELS)
            box_copy(rows + lane() * PANEL_BYTES, job.pool_map, job.pool, WIDTH, way.block * BLOCK_TOKENS + key % BLOCK_TOKENS,
                     lane() * 64, own);
    }
    if (present < BOX_ROWS) {
        if (present != 0) barrier_wait(own, way.lasts++ & 1);
        clear_rows(rows, present);
        release_written(there);
    }
    advance<STAGES>(way.turn);
}

DEV void fetch_all(const Job& job, const Shared& shared, Meeting* m, Place p) {
    Way way{};
    RingStage queries{};
    bool fresh = true;  // heads or token differ from those of the previous split
    while (p.left != 0) {
        if (fresh) {
            barrier_wait(&m->queries_free, queries.odd ^ 1);
            start_queries(job, shared, p);
        }
        const auto queries_there = [&] {
            if (!fresh) return;
            copy_wait<0>();
            release_written(&m->queries_there);
            advance<1>(queries);
            fresh = false;
        };
        const u32 end = end_key(p);
        way.block = block_at(job, p, first_key(p) + own_row(), end);
        for (u32 at = first_key(p); at < end; at += KEYS) {
            const u32 next = block_at(job, p, at + KEYS + own_row(), end);
            fetch_step(job, shared, m, way, at, end);
            way.block = next;
            queries_there();
        }
        queries_there();
        fresh = p.split + 1 == p.splits;
        next_place(p, job.rows);
    }
}
