// attention_decode/merge_records.h - a record is the output of one query over part of its keys, with the
// maximum and the sum of its probabilities. Warps write records to shared memory, splits to global memory;
// this file merges them.
#pragma once

#ifndef TOKENS_PER_BLOCK
#  define TOKENS_PER_BLOCK 1
#endif
enum : u32 {
    GROUP = HEAD_GROUP * TOKENS_PER_BLOCK,  // queries per block: all heads of one token, then of the next token
    RECORD = D + 4,        // floats per record: outputs, maximum, sum, and padding to 16 bytes
    QUADS = D / 4,         // number of groups of 4 outputs per record
    SET = WARPS * GROUP * RECORD,  // floats of the records of all warps of a block
    // Two sets, where shared memory allows, save a barrier: the next split writes one set while the records
    // of the previous split are read from the other.
    SETS = GROUP <= 4 ? 2 : 1,
    CHANNELS = D / WARP_SIZE,  // channels of a record per lane
    // Number of warps that share the splits of a query, and number of splits that a lane reads at once.
    SPREAD = GROUP >= WARPS ? 1 : WARPS / GROUP,
    AHEAD = 12
};

// Writes the warp's results to `records`, one record per query.
DEV void put(const SoftmaxState& r, float* records) {
    each_output(r, [&](u32 query, u32 channel, float value) {
        if (query < GROUP) records[query * RECORD + channel] = value;
    });
    if (!is_query_leader()) return;
    UNROLL for (u32 i = 0; i < SLOTS; ++i)
        if (query_of(i) < GROUP) *(f32x2*)(records + query_of(i) * RECORD + D) = f32x2{{r.max[i], r.sum[i]}};
}

// Four output channels of one query, merged over its split records.
struct MergedOutput {
    f32x4 value;
    float max, sum;
};

// Merges outputs d..d + 4 of one query over COUNT records, `stride` elements apart.
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

// Merges records with folded() and writes the result as a record to `to`.
DEV void fold(float* to, const float* records, u32 first, u32 count, u32 stride) {
    const FoldedRecord f = folded(records, first, count, stride);
    write_channels(to, f.value);
    if (lane() == 0) *(f32x2*)(to + D) = f32x2{{f.max, f.sum}};
}
