// latent_decode/merge.h - what a split leaves: means, or a record of each head, which the last block to arrive folds with those
// of the other splits.
#pragma once

// Of a lane that reads a record, and how many splits it reads at once.
enum : u32 { D = LATENT, CHANNELS = D / WAVE, SPREAD = 1, AHEAD = 4 };
#include "attention_decode/fold.h"

// Where results go.
struct Outputs {
    half_t* means;
    float* partial;
    u32* arrived;
    u32 heads, max_splits;
};

DEV u64 unit_of(const Place& p) { return (u64)p.row * gdim_y() + bid_y(); }
DEV half_t* mean_of(const Place& p, const Outputs& to, u32 head) {
    return to.means + ((u64)p.token * to.heads + first_head() + head) * LATENT;
}

// The wave's channels of a split that is the only one.
DEV void put_means(const Running& r, const Place& p, const Outputs& to) {
    UNROLL for (u32 i = 0; i < Frag::NC; ++i) {
        const u32 head = Frag::c_row(i);
        if (first_head() + head >= to.heads) continue;
        const float scale = p.context == 0 ? 0.f : 1.f / r.sum[slot_of(i)];
        half_t* mean = mean_of(p, to, head) + wave() * OWN * 16 + Frag::c_col(i);
        UNROLL for (u32 j = 0; j < OWN; ++j) mean[j * 16] = to_half(r.out[j].x[i] * scale);
    }
}

DEV void put(const Running& r, const Place& p, const Outputs& to) {
    if (p.splits == 1) return put_means(r, p, to);
    float* records = to.partial + (unit_of(p) * to.max_splits + p.split) * TILE * RECORD;
    UNROLL for (u32 i = 0; i < Frag::NC; ++i) {
        float* record = records + Frag::c_row(i) * RECORD + wave() * OWN * 16 + Frag::c_col(i);
        UNROLL for (u32 j = 0; j < OWN; ++j) record[j * 16] = r.out[j].x[i];
    }
    if (wave() != 0 || lane() % SHARERS != 0) return;
    UNROLL for (u32 slot = 0; slot < SLOTS; ++slot)
        *(f32x2*)(records + head_of(slot) * RECORD + D) = f32x2{{r.max[slot], r.sum[slot]}};
}

// All splits of the tile's heads.
DEV void merge_splits(const Place& p, const Outputs& to) {
    const float* records = to.partial + unit_of(p) * to.max_splits * TILE * RECORD;
    for (u32 head = wave(); head < TILE && first_head() + head < to.heads; head += WAVES) {
        const Folded f = folded(records + head * RECORD, 0, p.splits, TILE * RECORD);
        half_t* mean = mean_of(p, to, head) + lane() * CHANNELS;
        UNROLL for (u32 c = 0; c < CHANNELS; ++c) mean[c] = to_half(f.value.v[c] / f.sum);
    }
}
