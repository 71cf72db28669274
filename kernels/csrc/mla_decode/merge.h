// mla_decode/merge.h - stores the result of a split. If the context has a single split, this is the output:
// the weighted mean of compressed KV rows per head. Otherwise it is a partial result (record) per head, see
// records.h.
#pragma once
#include "mla_decode/records.h"

// Stores the output channels that this warp has accumulated, for a context with a single split.
DEV void store_outputs(const SoftmaxState& r, const SplitCursor& p, const MlaDecodeOutputs& to) {
    UNROLL for (u32 i = 0; i < FragLayout::NC; ++i) {
        const u32 head = FragLayout::c_row(i);
        if (first_head() + head >= to.heads) continue;
        const float scale = p.context == 0 ? 0.f : 1.f / r.sum[slot_of(i)];
#if WARP_SIZE == 64
        half_t* mean = mean_of(p, to, own_token(), head) + warp_of_token() * OWN * 16;
        UNROLL for (u32 j = 0; j < OWN; j += 2)
            *(u32*)(mean + output_channel(j, FragLayout::c_col(i))) = pack_half(r.out[j].x[i] * scale, r.out[j + 1].x[i] * scale);
#else
        half_t* mean = mean_of(p, to, own_token(), head) + warp_of_token() * OWN * 16 + FragLayout::c_col(i);
        UNROLL for (u32 j = 0; j < OWN; ++j) mean[j * 16] = to_half(r.out[j].x[i] * scale);
#endif
    }
}

DEV void put(const SoftmaxState& r, const SplitCursor& p, const MlaDecodeOutputs& to) {
    if (own_token() >= p.count) return;
    if (p.splits == 1) return store_outputs(r, p, to);
    float* records = records_of(p, to, own_token(), p.split);
    UNROLL for (u32 i = 0; i < FragLayout::NC; ++i) {
        if (FragLayout::c_row(i) >= kept_heads(to)) continue;
#if WARP_SIZE == 64
        float* record = records + FragLayout::c_row(i) * RECORD + warp_of_token() * OWN * 16;
        UNROLL for (u32 j = 0; j < OWN; j += 2)
            *(f32x2*)(record + output_channel(j, FragLayout::c_col(i))) = f32x2{{r.out[j].x[i], r.out[j + 1].x[i]}};
#else
        float* record = records + FragLayout::c_row(i) * RECORD + warp_of_token() * OWN * 16 + FragLayout::c_col(i);
        UNROLL for (u32 j = 0; j < OWN; ++j) record[j * 16] = r.out[j].x[i];
#endif
    }
    if (warp_of_token() != 0 || lane() % SHARERS != 0) return;
    UNROLL for (u32 slot = 0; slot < SLOTS; ++slot)
        if (head_of(slot) < kept_heads(to))
            *(f32x2*)(records + head_of(slot) * RECORD + D) = f32x2{{r.max[slot], r.sum[slot]}};
}
