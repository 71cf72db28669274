// mla_decode_wgmma/store.h - stores the half of the output channels that a warpgroup has accumulated: as
// outputs, or as partial results of a split (records, mla_decode/records.h).
#pragma once

enum : u32 { SUMS = HALF / 2 };  // accumulators per lane: two query rows, a quarter of the channels each

DEV u32 first_channel() { return warp_id() / 4 * HALF; }

// A query row of the MMA: one head of one of the tokens that the block processes together.
struct QueryRow {
    u32 token, head;
    bool valid;
};
// Returns a shared memory table with the token and head of every query row of the MMA, packed into one word
// each. The table is precomputed, because a division at each use would need too many registers.
DEV u32* query_row_table() { SHARED(u32, packed_rows, TILE); return packed_rows; }
DEV void set_queries(u32 heads) {
    if (tid() < TILE) query_row_table()[tid()] = heads >= TILE ? tid() : tid() / heads << 16 | tid() % heads;
}
DEV QueryRow query_of(u32 row, const SplitCursor& p, const MlaDecodeOutputs& to) {
    const u32 packed_row = query_row_table()[row], token = packed_row >> 16, head = packed_row & 0xffff;
    return QueryRow{token, head, token < p.count && first_head() + head < to.heads};
}

// Stores the outputs of a context with a single split. `scale`: for each of the two query rows of this lane,
// the factor that normalises the outputs (1 / sum of probabilities).
DEV void store_outputs(const float (&o)[SUMS], const SplitCursor& p, const MlaDecodeOutputs& to,
                       const float (&scale)[2]) {
    UNROLL for (u32 slot = 0; slot < 2; ++slot) {
        const QueryRow query_row = query_of(wgmma_row(slot * 2), p, to);
        if (!query_row.valid) continue;
        half_t* mean = mean_of(p, to, query_row.token, query_row.head) + first_channel();
        UNROLL for (u32 i = slot * 2; i < SUMS; i += 4)
            *(u32*)(mean + wgmma_col(i)) = pack_half(o[i] * scale[slot], o[i + 1] * scale[slot]);
    }
}

// Writes zeros to the outputs of a row without keys. The outputs may be the same memory as the queries;
// therefore a barrier first waits until the first warpgroup has read the queries.
DEV void store_zeros(const SplitCursor& p, const MlaDecodeOutputs& to) {
    team_sync();
    for (u32 row = warp_id(); row < TILE; row += WARPS) {
        const QueryRow query_row = query_of(row, p, to);
        if (!query_row.valid) return;
        for (u32 channel = lane() * 8; channel < KV_LORA_RANK; channel += WARP_SIZE * 8)
            *(u32x4*)(mean_of(p, to, query_row.token, query_row.head) + channel) = u32x4{{0, 0, 0, 0}};
    }
}

// Stores the partial result (record) of a split. `stats`: maximum score (times log2(e)) and sum of
// probabilities over all keys of the split, for each of the two query rows of this lane; null if another
// warpgroup stores them.
DEV void store_record(const float (&o)[SUMS], const SplitCursor& p, const MlaDecodeOutputs& to, const f32x2* stats) {
    UNROLL for (u32 slot = 0; slot < 2; ++slot) {
        const QueryRow query_row = query_of(wgmma_row(slot * 2), p, to);
        if (!query_row.valid) continue;
        float* record = records_of(p, to, query_row.token, p.split) + query_row.head * RECORD;
        UNROLL for (u32 i = slot * 2; i < SUMS; i += 4)
            *(f32x2*)(record + first_channel() + wgmma_col(i)) = f32x2{{o[i], o[i + 1]}};
        if (stats && lane() % 4 == 0) *(f32x2*)(record + KV_LORA_RANK) = stats[slot];
    }
}
