// attention_single_row/merge_cluster.h - merges the partial attention results (records) of the blocks of a
// cluster in the first block of the cluster.
#pragma once

enum : u32 { SENT_BYTES = HEAD_GROUP * (QUADS + 1) * 16 };  // bytes that a block sends to the first block

// Merges the partial results (records) of the warps of this block, and stores the merged record in the shared
// memory of the first block of the cluster.
DEV void send_records(const SharedMemoryLayout& s, const SplitCursor& p) {
    for (u32 i = tid(); i < HEAD_GROUP * QUADS; i += (u32)TEAM) {
        const u32 query = i / QUADS, d = i % QUADS * 4;
        const MergedOutput m = merge<WARPS>(s.records + query * RECORD, d, HEAD_GROUP * RECORD);
        float* to = s.received + (p.rank * HEAD_GROUP + query) * RECORD;
        peer_store<BLOCKS>(to + d, 0, m.value, s.records_full);
        if (d == 0) peer_store<BLOCKS>(to + D, 0, f32x4{{m.max, m.sum, 0.f, 0.f}}, s.records_full);
    }
}

// Merges output channels [d, d + 4) of one query over the partial results (records) of the first `count`
// blocks of the cluster.
DEV MergedOutput merge_blocks(const float* records, u32 d, u32 count) {
    MergedOutput m{f32x4{{0.f, 0.f, 0.f, 0.f}}, NO_SCORE, 0.f};
    f32x2 stats[BLOCKS];
    f32x4 parts[BLOCKS];
    UNROLL for (u32 i = 0; i < BLOCKS; ++i) {
        const float* record = records + (i < count ? i : 0) * HEAD_GROUP * RECORD;
        stats[i] = *(const f32x2*)(record + D);
        parts[i] = *(const f32x4*)(record + d);
        if (i >= count) stats[i] = f32x2{{NO_SCORE, 0.f}};
    }
    UNROLL for (u32 i = 0; i < BLOCKS; ++i) m.max = fmax_(m.max, stats[i].v[0]);
    UNROLL for (u32 i = 0; i < BLOCKS; ++i) {
        const float weight = i < count ? exp2_(stats[i].v[0] - m.max) : 0.f;
        UNROLL for (u32 c = 0; c < 4; ++c) m.value.v[c] = fma_(weight, parts[i].v[c], m.value.v[c]);
        m.sum = fma_(weight, stats[i].v[1], m.sum);
    }
    return m;
}

// Waits for the partial results of all blocks of the cluster, merges them and stores the outputs. Called in
// the first block of the cluster.
DEV void finish_cluster(const SharedMemoryLayout& s, const SplitCursor& p, half_t* out SINKS_PARAM) {
    barrier_wait_peers(s.records_full, 0);
    for (u32 i = tid(); i < HEAD_GROUP * QUADS; i += (u32)TEAM) {
        const MergedOutput m = merge_blocks(s.received + i / QUADS * RECORD, i % QUADS * 4, p.splits);
#if SINKS
        const float sum = with_sink(m.sum, m.max, sinks, p.head * HEAD_GROUP + i / QUADS);
#else
        const float sum = m.sum;
#endif
        half_x4 y;
        UNROLL for (u32 c = 0; c < 4; ++c) y.v[c] = to_half(m.value.v[c] / sum);
        *(half_x4*)(out + i * 4) = y;
    }
}
