// mla_prefill/carry_over.h - carry-over state of a tile (successive tokens of a row) whose keys are processed
// by several launches, one per window of keys: the outputs, maxima and sums of each lane, stored in f32 at an
// address from which the same lane reads them in the next launch.
#pragma once

enum : u32 { CONSUMER_THREADS = 256 };

// Returns the address of the carry-over state of a tile of `tile_tokens` tokens. The tile begins `first`
// tokens after `token`, the first token of row i. Different tiles have different addresses: the index of the
// first tile of a row exceeds that of the previous row by at least the number of tiles of the previous row.
DEV f32x4* carry_over_of(const MlaPrefillParams& job, u32 i, u32 token, u32 first, u32 tile_tokens, u32 head,
                         u32 pieces) {
    const u32 tile = token / tile_tokens + i + first / tile_tokens;
    return (f32x4*)job.carried + ((u64)tile * job.heads + head) * pieces * CONSUMER_THREADS;
}
