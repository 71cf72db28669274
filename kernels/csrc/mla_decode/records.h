// mla_decode/records.h - what a split leaves behind where there are several: a record of each head, sums of latents, then
// their maximum and sum. The last block to arrive folds those of all splits into means. Whoever includes it says what TILE, WARPS
// and first_head() are. Tokens that are taken together have their records, and means, each where it would have them alone.
#pragma once

// Of a lane that reads a record, and how many splits it reads at once.
enum : u32 { RECORD = LATENT + 16, D = LATENT, CHANNELS = D / WARP_SIZE, SPREAD = 1, AHEAD = 4 };
#include "attention_decode/fold_records.h"

// Where results go.
struct Outputs {
    half_t* means;
    float* partial;
    u32* arrived;
    u32 heads;
};

DEV u64 unit_of(const Place& p) { return (u64)p.row * gdim_y() + bid_y(); }
// Heads that a block's records are of.
DEV u32 kept_heads(const Outputs& to) { return to.heads < TILE ? to.heads : TILE; }
// Floats of a split.
DEV u32 split_floats(const Outputs& to) { return kept_heads(to) * RECORD; }
// Of token i of those at a place, from the block's first head on.
DEV float* records_of(const Place& p, const Outputs& to, u32 i, u32 split) {
    return to.partial + ((u64)(p.record + i * p.splits + split) * gdim_y() + bid_y()) * split_floats(to);
}
DEV half_t* mean_of(const Place& p, const Outputs& to, u32 i, u32 head) {
    return to.means + ((u64)(p.token + i) * to.heads + first_head() + head) * LATENT;
}

// All splits of the tile's heads.
DEV void merge_splits(const Place& p, const Outputs& to) {
    const u32 heads = to.heads - first_head() < TILE ? to.heads - first_head() : TILE;
    for (u32 at = warp_id(); at < p.count * heads; at += WARPS) {
        const u32 token = at / heads, head = at % heads;
        const Folded f = folded(records_of(p, to, token, 0) + head * RECORD, 0, p.splits, gdim_y() * split_floats(to));
        half_t* mean = mean_of(p, to, token, head);
        UNROLL for (u32 c = 0; c < CHANNELS; c += 2)
            *(u32*)(mean + folded_channel(c)) = pack_half(f.value.v[c] / f.sum, f.value.v[c + 1] / f.sum);
    }
}
