// attention_prefill/partial_scores.h - adds the partial scores of two warps that share the channels of 16 queries
// (CHANNEL_WARPS in attention/warp.h): warps 2 i and 2 i + 1 of a block. Both compute the same sum, so that their
// probabilities are equal.
#pragma once

enum : u32 { STEP_TILES = STEP / TILE_KEYS, SCORE_VECTORS = SLOTS * KEYS / 4 };
// The scores of a lane as vectors.
struct ScoreVectors { f32x4 v[SCORE_VECTORS]; };

// Returns the first channel of this warp.
DEV u32 own_channel() { return warp_id() % CHANNEL_WARPS * OWN_D; }

// Returns the vectors of a warp's partial scores of a tile in shared memory, of which a lane has every WARP_SIZE-th one.
DEV f32x4* partial_scores(u32 warp, u32 tile) {
    SHARED(f32x4, scores, 256 / WARP_SIZE * STEP_TILES * SCORE_VECTORS * WARP_SIZE);
    return scores + (warp * STEP_TILES + tile) * SCORE_VECTORS * WARP_SIZE + lane();
}

DEV void put_partial_scores(const ScoreFragment& s, u32 tile) {
    const ScoreVectors own = bits_as<ScoreVectors>(s);
    UNROLL for (u32 i = 0; i < SCORE_VECTORS; ++i) partial_scores(warp_id(), tile)[i * WARP_SIZE] = own.v[i];
}

// Returns the sum of the scores that both warps have put; called after a barrier.
DEV ScoreFragment sum_of_partial_scores(u32 tile) {
    ScoreVectors sum;
    UNROLL for (u32 i = 0; i < SCORE_VECTORS; ++i) {
        const f32x4* low_scores = partial_scores(warp_id() & ~1u, tile) + i * WARP_SIZE;
        const f32x4 low = low_scores[0], high = low_scores[STEP_TILES * SCORE_VECTORS * WARP_SIZE];
        UNROLL for (u32 e = 0; e < 4; ++e) sum.v[i].v[e] = low.v[e] + high.v[e];
    }
    return bits_as<ScoreFragment>(sum);
}
