// mla_decode/records.h - partial results (records) of the splits of a context with several splits. A record
// has, for one head and split, the weighted sum of compressed KV rows, the maximum score and the sum of
// probabilities. The block that finishes last merges the records of all splits into outputs. The including
// file defines TILE, WARPS and first_head(). Tokens that are processed together have separate records and
// outputs, at the same addresses as if each token were processed alone.
#pragma once

// Constants for fold_records.h. RECORD: floats per record (partial result of a split for one head). CHANNELS:
// channels of a record that a lane merges. SPREAD: warps per head. AHEAD: number of records that a lane loads
// at a time.
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
// Returns the number of heads per block for which partial results (records) are stored.
DEV u32 kept_heads(const MlaDecodeOutputs& to) { return to.heads < TILE ? to.heads : TILE; }
// Returns the number of floats in the partial results (records) of all heads of a block for one split.
DEV u32 split_floats(const MlaDecodeOutputs& to) { return kept_heads(to) * RECORD; }
// Returns the address of the partial result (record) of the first head of this block for split `split` of
// token i. Token i is counted within the tokens at `p` that are processed together.
DEV float* records_of(const SplitCursor& p, const MlaDecodeOutputs& to, u32 i, u32 split) {
    return to.partial + ((u64)(p.record + i * p.splits + split) * gdim_y() + bid_y()) * split_floats(to);
}
DEV half_t* mean_of(const SplitCursor& p, const MlaDecodeOutputs& to, u32 i, u32 head) {
    return to.means + ((u64)(p.token + i) * to.heads + first_head() + head) * KV_LORA_RANK;
}

// Merges the partial results of all splits for the heads of this block, and stores the outputs.
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
