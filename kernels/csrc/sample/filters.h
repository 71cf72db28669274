// filters.h - sampling among the ids that remain after min-p, top-k and top-p.
//
// The token is the argmax of value + noise over the kept ids, which are all ids up to one cutoff. The cutoff
// of top-p is found without sorting: take the winner among all ids up to the current cutoff; if the mass
// before it is less than top-p, the winner itself is kept, so it is the winner among the kept ids; otherwise
// it and everything after it is cut off, and the next winner is searched before it. Each round about halves
// the excess mass. Noise is keyed by id, so the winners of chunks within the cutoff remain those that the
// scan found.
#pragma once
#include "sample/select.h"

// Winner of each chunk among the ids up to the cutoff.
struct Winners {
    u64 noisy[MAX_CHUNKS];    // place of the noisy value; 0: none
    float value[MAX_CHUNKS];  // without the noise
};

struct Draw {
    u64 key;
    u32 position;
};

// One warp finds the winner of chunk c among places >= `cutoff`.
DEV void find_winner(Winners& winners, const Row& row, const Draw& draw, u32 c, u64 cutoff) {
    u64 own = 0;
    float own_value = 0.f;
    for (u32 at = lane() * 4; at < CHUNK; at += WARP_SIZE * 4) {
        const u32 id = row.first + c * CHUNK + at;
        if (id >= row.end) break;
        const f32x4 four = values4(row, id);
        bool any = false;
        for (u32 i = 0; i < 4; ++i) any = any || place_of(four.v[i], id + i) >= cutoff;
        if (!any) continue;
        const u32x4 words = philox(draw.key, id / 4, DRAW_TOKEN, draw.position);
        for (u32 i = 0; i < 4; ++i) {
            if (place_of(four.v[i], id + i) < cutoff) continue;
            const u64 noisy = place_of(four.v[i] + gumbel(words.v[i]), id + i);
            if (noisy > own) {
                own = noisy;
                own_value = four.v[i];
            }
        }
    }
    const u64 first = warp_first(own);
    if (first == 0) {
        if (lane() == 0) winners.noisy[c] = 0;
    } else if (own == first) {
        winners.noisy[c] = first;
        winners.value[c] = own_value;
    }
}

// Place of the winner's value among the ids up to the cutoff; 0 if there is none.
DEV u64 winner_from(Winners& winners, const Search& search, const Row& row, const Draw& draw, u64 cutoff) {
    const u32 chunks = chunks_of(row);
    for (u32 c = warp_id(); c < chunks; c += bdim() / WARP_SIZE) {
        const u64 noisy = winners.noisy[c];
        const bool stays = noisy != 0 && place_of(winners.value[c], id_of(noisy)) >= cutoff;
        const bool reaches = search.order[c] >= (u32)(cutoff >> 32);
        warp_sync();
        if (!stays && reaches) find_winner(winners, row, draw, c, cutoff);
        if (!stays && !reaches && lane() == 0) winners.noisy[c] = 0;
    }
    sync();
    const u64 first = block_first(tid() < chunks ? winners.noisy[tid()] : 0);
    return first == 0 ? 0 : place_of(winners.value[(id_of(first) - row.first) / CHUNK], id_of(first));
}

// Cutoff of min-p: places below it are cut off; `most` is the largest value of the row.
DEV u64 min_p_floor(const SequenceSamplingParams& params, float most) {
    if (params.min_p <= 0.f) return LAST_UNMASKED;
    const u64 floor = (u64)order_of(most + ln(fmin_(params.min_p, 1.f))) << 32;
    return floor > LAST_UNMASKED ? floor : LAST_UNMASKED;
}

// Samples a token under the sampling parameters. `best` is the first place of the row, `total` the mass of
// the whole row relative to it. search.order and the winners are initialised from the scan.
DEV u32 sample_with_filters(Search& search, Winners& winners, const Row& row, const SequenceSamplingParams& params, const Draw& draw,
                            u64 best, float total) {
    const float most = value_of(best);
    u64 cutoff = min_p_floor(params, most);
    if (params.top_k > 0 && (u32)params.top_k < row.end) {
        const u64 kth = kth_place(search, row, (u32)params.top_k, bound_for(search, chunks_of(row), (u32)params.top_k));
        cutoff = kth > cutoff ? kth : cutoff;
    }
    const bool needs_masses = params.top_p < 1.f;
    if (needs_masses && cutoff != LAST_UNMASKED) total = mass_from(search, row, cutoff, most);
    for (;;) {
        const u64 place = winner_from(winners, search, row, draw, cutoff);
        if (!needs_masses || place == best || place == 0) return id_of(place == 0 ? best : place);
        if (mass_from(search, row, place + 1, most) < total * params.top_p) return id_of(place);
        cutoff = place + 1;
    }
}
