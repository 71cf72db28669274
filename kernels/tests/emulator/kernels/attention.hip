// Test kernel: paged attention of one query per sequence, head dimension 128, f32. One block per sequence;
// each warp processes some of the tokens with an online softmax, then the results of all warps are merged
// through dynamic shared memory.
#include "dev.h"

enum : u32 { D = 128, PER_LANE = D / WARP_SIZE, ROW = D + 2 };

// out, q [sequences, D]; keys, values [blocks, block_tokens, D]; table [sequences, blocks_per_row]. Dynamic
// shared memory: ROW floats per warp. Grid: one block per sequence.
KERNEL(256) paged_attention(float* out, const float* q, const float* keys, const float* values, const u32* table,
                            const u32* lens, u32 block_tokens, u32 blocks_per_row, float scale) {
    const u32 s = bid_x(), waves = bdim() / WARP_SIZE, n = lens[s];
    float query[PER_LANE], acc[PER_LANE], top = -1e30f, total = 0.f;
    for (u32 i = 0; i < PER_LANE; ++i) {
        query[i] = q[s * D + lane() * PER_LANE + i] * scale * 1.44269504f;
        acc[i] = 0.f;
    }
    for (u32 t = warp_id(); t < n; t += waves) {
        const u64 at = ((u64)table[s * blocks_per_row + t / block_tokens] * block_tokens + t % block_tokens) * D;
        float score = 0.f;
        for (u32 i = 0; i < PER_LANE; ++i) score += query[i] * keys[at + lane() * PER_LANE + i];
        score = warp_sum(score);
        const float next = fmax_(top, score), keep = exp2_(top - next), weight = exp2_(score - next);
        total = total * keep + weight;
        top = next;
        for (u32 i = 0; i < PER_LANE; ++i) acc[i] = acc[i] * keep + weight * values[at + lane() * PER_LANE + i];
    }
    DYN_SHARED(float, parts);
    float* mine = parts + warp_id() * ROW;
    for (u32 i = 0; i < PER_LANE; ++i) mine[lane() * PER_LANE + i] = acc[i];
    if (lane() == 0) {
        mine[D] = top;
        mine[D + 1] = total;
    }
    sync();  // before the merge
    if (warp_id() != 0) return;
    float all = -1e30f, sum = 0.f;
    for (u32 w = 0; w < waves; ++w) all = fmax_(all, parts[w * ROW + D]);
    for (u32 i = 0; i < PER_LANE; ++i) acc[i] = 0.f;
    for (u32 w = 0; w < waves; ++w) {
        const float weight = exp2_(parts[w * ROW + D] - all);
        sum += weight * parts[w * ROW + D + 1];
        for (u32 i = 0; i < PER_LANE; ++i) acc[i] += weight * parts[w * ROW + lane() * PER_LANE + i];
    }
    for (u32 i = 0; i < PER_LANE; ++i) out[s * D + lane() * PER_LANE + i] = acc[i] / sum;
}
EXPORT(paged_attention)
