// latent_decode/records.h - what a split leaves behind where there are several: a record of each head, sums of latents, then
// their maximum and sum. The last block to arrive folds those of all splits into means. Whoever includes it says what TILE, WAVES
// and first_head() are.
#pragma once

// Of a lane that reads a record, and how many splits it reads at once.
enum : u32 { RECORD = LATENT + 16, D = LATENT, CHANNELS = D / WAVE, SPREAD = 1, AHEAD = 4 };
#include "attention_decode/fold.h"

// Where results go.
struct Outputs {
    half_t* means;
    float* partial;
    u32* arrived;
    u32 heads, max_splits;
};

DEV u64 unit_of(const Place& p) { return (u64)p.row * gdim_y() + bid_y(); }
// Heads that a block's records are of.
DEV u32 kept_heads(const Outputs& to) { return to.heads < TILE ? to.heads : TILE; }
DEV float* records_of(const Place& p, const Outputs& to, u32 split) {
    return to.partial + (unit_of(p) * to.max_splits + split) * kept_heads(to) * RECORD;
}
DEV half_t* mean_of(const Place& p, const Outputs& to, u32 head) {
    return to.means + ((u64)p.token * to.heads + first_head() + head) * LATENT;
}

// All splits of the tile's heads.
DEV void merge_splits(const Place& p, const Outputs& to) {
    const float* records = records_of(p, to, 0);
    for (u32 head = wave(); head < TILE && first_head() + head < to.heads; head += WAVES) {
        const Folded f = folded(records + head * RECORD, 0, p.splits, kept_heads(to) * RECORD);
        half_t* mean = mean_of(p, to, head);
        UNROLL for (u32 c = 0; c < CHANNELS; c += 2)
            *(u32*)(mean + folded_channel(c)) = pack_half(f.value.v[c] / f.sum, f.value.v[c + 1] / f.sum);
    }
}
