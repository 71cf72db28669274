// attention_decode/mask_first_keys.h - masks the keys of the first tile of a row that the row does not attend to:
// those before its window, and those before FIRST_POSITION. Every later tile is inside the window, because the
// first split begins at the tile that has the first key (origin_of in split_schedule.h).
#pragma once

#if FIRST_POSITION || WINDOWED
// Index in its tile of the key of score `j` of a lane.
DEV u32 key_of_score(u32 j) {
#  if KEYS_FIRST
    return key_row(j);
#  else
    return key_of(j);
#  endif
}
#endif

#if WINDOWED
DEV u32 window_of(const BatchMetadata& rows) { return rows.window; }

// Masks the scores of the keys before the first key of each query; called for the first tile of a row.
template <u32 QUERIES_OF_LANE, u32 KEYS_OF_LANE>
DEV void mask_first_keys(float (&scores)[QUERIES_OF_LANE][KEYS_OF_LANE], const SplitCursor& p, u32 window) {
    UNROLL for (u32 i = 0; i < QUERIES_OF_LANE; ++i) {
        const u32 seen = TOKENS_PER_BLOCK == 1 ? p.context : p.context + 1 + query_of(i) / HEAD_GROUP - p.count;
        const u32 first = first_key_of(seen, window, FIRST_POSITION);
        UNROLL for (u32 j = 0; j < KEYS_OF_LANE; ++j)
            if (origin_of(p) + key_of_score(j) < first) scores[i][j] = NO_SCORE;
    }
}
#elif FIRST_POSITION
DEV u32 window_of(const BatchMetadata&) { return 0; }

// Masks the scores of the first FIRST_POSITION keys of a context; called for the first tile, which contains
// all of them.
template <u32 QUERIES_OF_LANE, u32 KEYS_OF_LANE>
DEV void mask_first_keys(float (&scores)[QUERIES_OF_LANE][KEYS_OF_LANE], const SplitCursor&, u32) {
    UNROLL for (u32 j = 0; j < KEYS_OF_LANE; ++j) {
        if (key_of_score(j) >= FIRST_POSITION) continue;
        UNROLL for (u32 i = 0; i < QUERIES_OF_LANE; ++i) scores[i][j] = NO_SCORE;
    }
}
#endif
