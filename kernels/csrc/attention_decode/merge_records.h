// attention_decode/merge_records.h - merges partial attention results (records). A record is the unnormalised
// output of one query over a subset of its keys, the maximum score and the sum of probabilities. Each warp
// writes the records of its keys to shared memory; the merged record of a split is stored in global memory.
#pragma once

#ifndef TOKENS_PER_BLOCK
#  define TOKENS_PER_BLOCK 1
#endif
enum : u32 {
    GROUP = HEAD_GROUP * TOKENS_PER_BLOCK,  // queries per block: all heads of one token, then of the next token
    RECORD = D + 4,        // floats per record: outputs, maximum, sum, and padding to 16 bytes
    QUADS = D / 4,         // number of groups of 4 outputs per record
    SET = WARPS * GROUP * RECORD,  // floats of the records of all warps of a block
    // Number of buffers for the partial results (records) of all warps. With two buffers, which fit into
    // shared memory for small GROUP, no barrier is needed before the next split writes its records, because
    // the records of the previous split are in the other buffer.
    SETS = GROUP <= 4 ? 2 : 1,
    CHANNELS = D / WARP_SIZE,  // channels of a record per lane
    // SPREAD: number of warps among which the splits of a query are divided for merging. AHEAD: number of
    // splits whose partial results a lane loads at a time.
    SPREAD = GROUP >= WARPS ? 1 : WARPS / GROUP,
    AHEAD = WARP_SIZE == 64 || D > 256 ? 8 : 12
};

// Writes the partial results of this warp to `records`: one record (outputs, maximum, sum) per query.
DEV void put(const SoftmaxState& r, float* records) {
    each_output(r, [&](u32 query, u32 channel, float value) {
        if (query < GROUP) records[query * RECORD + channel] = value;
    });
    if (!is_query_leader()) return;
    UNROLL for (u32 i = 0; i < SLOTS; ++i)
        if (query_of(i) < GROUP) *(f32x2*)(records + query_of(i) * RECORD + D) = f32x2{{r.max[i], r.sum[i]}};
}

// Four output channels, maximum score and sum of probabilities of one query, merged over several partial
// results.
struct MergedOutput {
    f32x4 value;
    float max, sum;
};

// Merges output channels [d, d + 4) of one query over COUNT partial results (records), which are `stride`
// elements apart.
template <u32 COUNT> DEV MergedOutput merge(const float* records, u32 d, u32 stride) {
    MergedOutput m{f32x4{{0.f, 0.f, 0.f, 0.f}}, NO_SCORE, 0.f};
    f32x2 stats[COUNT];
    UNROLL for (u32 i = 0; i < COUNT; ++i) stats[i] = *(const f32x2*)(records + i * stride + D);
    UNROLL for (u32 i = 0; i < COUNT; ++i) m.max = fmax_(m.max, stats[i].v[0]);
    UNROLL for (u32 i = 0; i < COUNT; ++i) {
        const float weight = exp2_(stats[i].v[0] - m.max);
        const f32x4 part = *(const f32x4*)(records + i * stride + d);
        UNROLL for (u32 c = 0; c < 4; ++c) m.value.v[c] = fma_(weight, part.v[c], m.value.v[c]);
        m.sum = fma_(weight, stats[i].v[1], m.sum);
    }
    return m;
}

#include "attention_decode/fold_records.h"

// Merges partial results (records) as folded() does, and writes the merged record to `to`.
DEV void fold(float* to, const float* records, u32 first, u32 count, u32 stride) {
    const FoldedRecord f = folded(records, first, count, stride);
    write_channels(to, f.value);
    if (lane() == 0) *(f32x2*)(to + D) = f32x2{{f.max, f.sum}};
}
