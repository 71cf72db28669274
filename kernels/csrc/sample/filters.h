// filters.h - sampling among the ids that remain after min-p, top-k and top-p.
//
// The sampled token is the winner: the id with the largest value + Gumbel noise among the kept ids, which are
// all ids before a cutoff in the order of order.h. The cutoff of top-p is found without sorting. Each
// iteration finds the winner among the ids before the current cutoff. If the probability mass of the ids
// before the winner is less than top-p, top-p keeps the winner, which is then the sampled token; otherwise
// the winner and all ids after it are cut off. An iteration removes about half of the mass that exceeds
// top-p. The noise of an id is the same in all iterations, so the winner of a chunk remains valid as long as
// it is before the cutoff.
#pragma once
#include "sample/select.h"

// Winner of each chunk: the id with the largest logit + Gumbel noise among the ids before the cutoff of the
// filters.
struct ChunkWinners {
    u64 noisy[MAX_CHUNKS];    // sort key of value + noise; 0: no id is before the cutoff
    float value[MAX_CHUNKS];  // value of the winner without the noise
};

// Philox key of the request and token position, which determine the Gumbel noise of each id.
struct GumbelNoiseKey {
    u64 key;
    u32 position;
};

// Finds the winner of chunk c: the id with the largest logit + Gumbel noise among the ids with sort keys >=
// `cutoff`. Called by one warp.
DEV void find_winner(ChunkWinners& winners, const LogitsRowView& row, const GumbelNoiseKey& draw, u32 c, u64 cutoff) {
    u64 own = 0;
    float own_value = 0.f;
    for (u32 at = lane() * 4; at < CHUNK; at += WARP_SIZE * 4) {
        const u32 id = row.first + c * CHUNK + at;
        if (id >= row.end) break;
        const f32x4 four = values4(row, id);
        bool any = false;
        for (u32 i = 0; i < 4; ++i) any = any || sort_key_of(four.v[i], id + i) >= cutoff;
        if (!any) continue;
        const u32x4 words = philox(draw.key, id / 4, DRAW_TOKEN, draw.position);
        for (u32 i = 0; i < 4; ++i) {
            if (sort_key_of(four.v[i], id + i) < cutoff) continue;
            const u64 noisy = sort_key_of(four.v[i] + gumbel(words.v[i]), id + i);
            if (noisy > own) {
                own = noisy;
                own_value = four.v[i];
            }
        }
    }
    const u64 first = warp_max_key(own);
    if (first == 0) {
        if (lane() == 0) winners.noisy[c] = 0;
    } else if (own == first) {
        winners.noisy[c] = first;
        winners.value[c] = own_value;
    }
}

// Returns the sort key (without noise) of the winner of the row: the id with the largest logit + Gumbel noise
// among the ids with sort keys >= `cutoff`. Returns 0 if there is no such id.
DEV u64 winner_from(ChunkWinners& winners, const LogitsSearchScratch& search, const LogitsRowView& row,
                    const GumbelNoiseKey& draw, u64 cutoff) {
    const u32 chunks = chunks_of(row);
    for (u32 c = warp_id(); c < chunks; c += bdim() / WARP_SIZE) {
        const u64 noisy = winners.noisy[c];
        const bool is_current = noisy != 0 && sort_key_of(winners.value[c], id_of(noisy)) >= cutoff;
        const bool reaches = search.order[c] >= (u32)(cutoff >> 32);
        warp_sync();
        if (!is_current && reaches) find_winner(winners, row, draw, c, cutoff);
        if (!is_current && !reaches && lane() == 0) winners.noisy[c] = 0;
    }
    wait_shared();
    sync();
    const u64 first = block_max_key(tid() < chunks ? winners.noisy[tid()] : 0);
    return first == 0 ? 0 : sort_key_of(winners.value[(id_of(first) - row.first) / CHUNK], id_of(first));
}

// Returns the smallest sort key that min-p keeps. `most`: largest logit of the row after edits and
// temperature.
DEV u64 min_p_floor(const SequenceSamplingParams& params, float most) {
    if (params.min_p <= 0.f) return MIN_UNMASKED_KEY;
    const u64 floor = (u64)order_of(most + ln(fmin_(params.min_p, 1.f))) << 32;
    return floor > MIN_UNMASKED_KEY ? floor : MIN_UNMASKED_KEY;
}

// Samples a token with min-p, top-k and top-p, and returns its id. `best`: largest sort key of the row.
// `total`: sum of exp(value - value of `best`) over the row. search.order and `winners` must have been
// initialised with the results of sample_scan.
DEV u32 sample_with_filters(LogitsSearchScratch& search, ChunkWinners& winners, const LogitsRowView& row,
                            const SequenceSamplingParams& params, const GumbelNoiseKey& draw, u64 best, float total) {
    const float most = value_of(best);
    u64 cutoff = min_p_floor(params, most);
    if (params.top_k > 0 && (u32)params.top_k < row.end) {
        const u64 kth = kth_sort_key(search, row, (u32)params.top_k, kth_lower_bound(search, chunks_of(row), (u32)params.top_k));
        cutoff = kth > cutoff ? kth : cutoff;
    }
    const bool needs_masses = params.top_p < 1.f;
    if (needs_masses && cutoff != MIN_UNMASKED_KEY) total = mass_from(search, row, cutoff, most);
    for (;;) {
        const u64 sort_key = winner_from(winners, search, row, draw, cutoff);
        if (!needs_masses || sort_key == best || sort_key == 0) return id_of(sort_key == 0 ? best : sort_key);
        if (mass_from(search, row, sort_key + 1, most) < total * params.top_p) return id_of(sort_key);
        cutoff = sort_key + 1;
    }
}
