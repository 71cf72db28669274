// mla_decode/records.h - results of the splits of a context with several splits: one record per head, with
// the weighted sum of compressed KV rows, the maximum score and the sum of probabilities. The last block to
// arrive merges the records of all splits into outputs. The includer defines TILE, WARPS and first_head().
// Tokens that are processed together have separate records and outputs, at the same addresses as if each
// token were processed alone.
#pragma once

// Settings of fold_records.h: a lane reads CHANNELS channels of a record, of AHEAD splits at once.
enum : u32 { RECORD = KV_LORA_RANK + 16, D = KV_LORA_RANK, CHANNELS = D / WARP_SIZE, SPREAD = 1, AHEAD = 4 };
#include "attention_decode/fold_records.h"

// Output arrays of the kernel.
struct MlaDecodeOutputs {
    half_t* means;
    float* partial;
    u32* arrived;
    u32 heads;
};

DEV u64 unit_of(const SplitCursor& p) { return (u64)p.row * gdim_y() + bid_y(); }
// Number of heads of a block that have records.
DEV u32 kept_heads(const MlaDecodeOutputs& to) { return to.heads < TILE ? to.heads : TILE; }
// Number of floats in the records of a block's split.
DEV u32 split_floats(const MlaDecodeOutputs& to) { return kept_heads(to) * RECORD; }
// Returns the record of the block's first head, for token i of the group at `p` and the given split.
DEV float* records_of(const SplitCursor& p, const MlaDecodeOutputs& to, u32 i, u32 split) {
    return to.partial + ((u64)(p.record + i * p.splits + split) * gdim_y() + bid_y()) * split_floats(to);
}
DEV half_t* mean_of(const SplitCursor& p, const MlaDecodeOutputs& to, u32 i, u32 head) {
    return to.means + ((u64)(p.token + i) * to.heads + first_head() + head) * KV_LORA_RANK;
}

// Merges all splits of the block's heads.
DEV void merge_splits(const SplitCursor& p, const MlaDecodeOutputs& to) {
    const u32 heads = to.heads - first_head() < TILE ? to.heads - first_head() : TILE;
    for (u32 at = warp_id(); at < p.count * heads; at += WARPS) {
        const u32 token = at / heads, head = at % heads;
        const FoldedRecord f = folded(records_of(p, to, token, 0) + head * RECORD, 0, p.splits, gdim_y() * split_floats(to));
        half_t* mean = mean_of(p, to, token, head);
        UNROLL for (u32 c = 0; c < CHANNELS; c += 2)
            *(u32*)(mean + folded_channel(c)) = pack_half(f.value.v[c] / f.sum, f.value.v[c + 1] / f.sum);
    }
}
