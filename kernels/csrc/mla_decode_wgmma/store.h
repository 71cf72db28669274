// mla_decode_wgmma/store.h - stores a warpgroup's half of the channels: as outputs, or in records
// (mla_decode/records.h).
#pragma once

enum : u32 { SUMS = HALF / 2 };  // accumulators per lane: two query rows, a quarter of the channels each

DEV u32 first_channel() { return warp_id() / 4 * HALF; }

// A query row of the MMA: one head of one of the tokens at a cursor.
struct QueryRow {
    u32 token, head;
    bool valid;
};
// Shared table with the token and head of every query row; it is precomputed because divisions at each use
// would need too many registers.
DEV u32* query_row_table() { SHARED(u32, packed_rows, TILE); return packed_rows; }
DEV void set_queries(u32 heads) {
    if (tid() < TILE) query_row_table()[tid()] = heads >= TILE ? tid() : tid() / heads << 16 | tid() % heads;
}
DEV QueryRow query_of(u32 row, const SplitCursor& p, const MlaDecodeOutputs& to) {
    const u32 packed_row = query_row_table()[row], token = packed_row >> 16, head = packed_row & 0xffff;
    return QueryRow{token, head, token < p.count && first_head() + head < to.heads};
}

// Stores the outputs of a context with a single split. `scale`: factors of the lane's two query rows.
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

// Writes zeros to the outputs of a row without keys. The barrier is needed because the outputs may share
// memory with the queries, which the first warpgroup has read when it arrives.
DEV void store_zeros(const SplitCursor& p, const MlaDecodeOutputs& to) {
    team_sync();
    for (u32 row = warp_id(); row < TILE; row += WARPS) {
        const QueryRow query_row = query_of(row, p, to);
        if (!query_row.valid) return;
        for (u32 channel = lane() * 8; channel < KV_LORA_RANK; channel += WARP_SIZE * 8)
            *(u32x4*)(mean_of(p, to, query_row.token, query_row.head) + channel) = u32x4{{0, 0, 0, 0}};
    }
}

// Stores the record of a split. `stats`: maximum (in units of log2(e)) and sum of the lane's two query rows
// over all keys of the split; null: not stored.
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
