// mla_prefill/carry_over.h - carry-over state of a tile with keys in several windows: the outputs, maxima and
// sums of each lane, stored unrounded at an address that the same lane reads in the next window.
#pragma once

enum : u32 { CONSUMER_THREADS = 256 };

// Returns the carry-over address of a tile of `tile_tokens` tokens that begins `first` tokens after `token`,
// the first token of row i. Addresses are unique: from one row to the next the tile index grows by at least
// the number of whole tiles in the row's tokens, plus one.
DEV f32x4* carry_over_of(const MlaPrefillParams& job, u32 i, u32 token, u32 first, u32 tile_tokens, u32 head,
                         u32 pieces) {
    const u32 tile = token / tile_tokens + i + first / tile_tokens;
    return (f32x4*)job.carried + ((u64)tile * job.heads + head) * pieces * CONSUMER_THREADS;
}
