// mla_prefill/carry_over.h - what a tile whose keys are in several windows leaves in one and finds in the next: sums and facts of its lanes, bit
// for bit, each where the same lane looks for it.
#pragma once

enum : u32 { WORKING_THREADS = 256 };

// The place of a tile, of tiles of `tile_tokens`, that begins `first` tokens behind `token`, the first of row i. No two tiles have the same:
// from row to row the number grows by one more than whole tiles fit into the row's tokens.
DEV f32x4* carried_by(const Job& job, u32 i, u32 token, u32 first, u32 tile_tokens, u32 head, u32 pieces) {
    const u32 tile = token / tile_tokens + i + first / tile_tokens;
    return (f32x4*)job.carried + ((u64)tile * job.heads + head) * pieces * WORKING_THREADS;
}
