// mla_decode_wgmma/fetch.h - the producer warps: they load the queries of the tokens that are processed
// together once, and the rows of the KV pool in steps of KEYS rows, into WGMMA operand panels for the
// consumer warpgroups. They load ahead as long as pipeline stages are free.
#pragma once

// Barriers between producer and consumer warps.
struct PipelineBarriers {
    Barrier keys_full[STAGES], keys_empty[STAGES];
    Barrier tail_full[PRODUCER_WARPS];  // arrival of the last rows of a context, which do not fill a box
    Barrier queries_full, queries_empty;
    Barrier weights_full, weights_empty;  // probabilities of a step
};
static_assert(sizeof(PipelineBarriers) <= PIPELINE_BARRIER_BYTES, "panels begin after it");
// Addresses in the launch's dynamic shared memory.
struct SharedMemoryLayout { u8 *queries, *keys, *weights; };
struct MlaDecodeParams {
    BatchMetadata rows;
    MlaDecodeOutputs to;
    const half_t *absorbed_q, *q, *pool;
    const TensorMap* pool_map;
    u32 query, q_stride;
    float factor;
};

DEV void init_barriers(PipelineBarriers* m) {
    for (u32 i = 0; i < STAGES; ++i) {
        barrier_init(&m->keys_full[i], PRODUCER_WARPS);
        barrier_init(&m->keys_empty[i], WARPS);
    }
    for (u32 i = 0; i < PRODUCER_WARPS; ++i) barrier_init(&m->tail_full[i], 1);
    barrier_init(&m->queries_full, PRODUCER_WARPS);
    barrier_init(&m->queries_empty, WARPS / 2);
    barrier_init(&m->weights_full, WARPS / 2);
    barrier_init(&m->weights_empty, WARPS / 2);
    barriers_ready();
}

DEV SharedMemoryLayout shared_layout(u8* dynamic) {
    u8* queries = align_1024(dynamic + PIPELINE_BARRIER_BYTES);
    u8* keys = queries + OPERAND_BYTES;
    return SharedMemoryLayout{queries, keys, keys + STAGES * OPERAND_BYTES};
}

// Starts loading the queries of the tokens at `p`; each producer warp loads 16 query rows. Query rows of
// heads and tokens that do not exist are zero-filled.
DEV void start_queries(const MlaDecodeParams& job, const SharedMemoryLayout& shared, const SplitCursor& p) {
    constexpr u32 PIECES = WIDTH / 8, KV_LORA_PIECES = KV_LORA_RANK / 8, HEADS = TILE / PRODUCER_WARPS;
    const u32 first = (warp_id() - WARPS) * HEADS;
    _Pragma("unroll 1") for (u32 row = first; row < first + HEADS; ++row) {
        const QueryRow query_row = query_of(row, p, job.to);
        const bool valid = query_row.valid;
        const u64 token = p.token + query_row.token;
        const half_t* absorbed_q = job.absorbed_q + (token * job.to.heads + first_head() + query_row.head) * KV_LORA_RANK;
        const half_t* rope_q = job.q + token * job.q_stride + (first_head() + query_row.head + 1) * job.query - WIDTH;
        UNROLL for (u32 at = 0; at < PIECES; at += WARP_SIZE) {
            const u32 piece = at + lane();
            if (piece >= PIECES) break;
            u8* to = shared.queries + piece / 8 * PANEL_BYTES + panel_offset(row, piece % 8);
            cp_async16_zfill(to, (valid ? piece < KV_LORA_PIECES ? absorbed_q : rope_q : job.absorbed_q) + piece * 8 * valid, valid);
        }
    }
    cp_async_commit();
}

// State of a producer warp, which loads BOX_ROWS rows of every step.
struct ProducerState {
    u32 block;  // block-table entry of its rows, loaded one step in advance
    u32 tail_uses;  // number of uses of tail_full so far
    PipelineState pipe;
};

DEV u32 own_row() { return (warp_id() - WARPS) * BOX_ROWS; }
DEV u32 block_at(const MlaDecodeParams& job, const SplitCursor& p, u32 key, u32 end) {
    return key < end ? (u32)job.rows.tables[(u64)p.table * job.rows.table_width + key / BLOCK_TOKENS] : 0;
}

// Zeroes the KV rows of positions beyond the context: they are multiplied by probabilities of zero, and NaN
// or infinity times zero would be NaN.
DEV void clear_rows(u8* rows, u32 first) {
    for (u32 i = first * 8 + lane(); i < BOX_ROWS * 8; i += WARP_SIZE)
        for (u32 panel = 0; panel < PANELS; ++panel) *(u32x4*)(rows + panel * PANEL_BYTES + i * 16) = u32x4{{0, 0, 0, 0}};
}

// Loads the KV rows of this producer warp for the step of keys [at, at + KEYS), in a split that ends at key
// `end`.
DEV void fetch_step(const MlaDecodeParams& job, const SharedMemoryLayout& shared, PipelineBarriers* m,
                    ProducerState& producer, u32 at, u32 end) {
    const u32 key = at + own_row(), stage = producer.pipe.stage;
    const u32 present = key >= end ? 0 : end - key < BOX_ROWS ? end - key : BOX_ROWS;
    u8* rows = shared.keys + stage * OPERAND_BYTES + own_row() * 128;
    Barrier *full = &m->keys_full[stage], *own = present == BOX_ROWS ? full : &m->tail_full[warp_id() - WARPS];
    barrier_wait(&m->keys_empty[stage], producer.pipe.phase ^ 1);
    if (present != 0) {
        if (lane() == 0) barrier_expect(own, PANELS * BOX_BYTES);
        warp_sync();
        if (lane() < PANELS)
            box_copy(rows + lane() * PANEL_BYTES, job.pool_map, job.pool, WIDTH,
                     producer.block * BLOCK_TOKENS + key % BLOCK_TOKENS, lane() * 64, own);
    }
    if (present < BOX_ROWS) {
        if (present != 0) barrier_wait(own, producer.tail_uses++ & 1);
        clear_rows(rows, present);
        release_written(full);
    }
    advance<STAGES>(producer.pipe);
}

DEV void fetch_all(const MlaDecodeParams& job, const SharedMemoryLayout& shared, PipelineBarriers* m, SplitCursor p) {
    ProducerState producer{};
    PipelineState queries{};
    bool new_queries = true;  // heads or token differ from those of the previous split
    while (p.left != 0) {
        if (new_queries) {
            barrier_wait(&m->queries_empty, queries.phase ^ 1);
            start_queries(job, shared, p);
        }
        const auto signal_queries = [&] {
            if (!new_queries) return;
            cp_async_wait<0>();
            release_written(&m->queries_full);
            advance<1>(queries);
            new_queries = false;
        };
        const u32 end = end_key(p);
        producer.block = block_at(job, p, first_key(p) + own_row(), end);
        for (u32 at = first_key(p); at < end; at += KEYS) {
            const u32 next = block_at(job, p, at + KEYS + own_row(), end);
            fetch_step(job, shared, m, producer, at, end);
            producer.block = next;
            signal_queries();
        }
        signal_queries();
        new_queries = p.split + 1 == p.splits;
        advance_cursor(p, job.rows);
    }
}
