// scan.h - processing of one chunk of a logits row in sample_scan: applies the logit edits and computes the
// statistics of the chunk (ChunkRecord).
#pragma once
#include "sample/logit_edits.h"

// Arguments that all chunks of a logits row share.
struct LogitsRowArgs {
    SamplingMode mode;
    const SequenceSamplingParams* params;
    const StagedLogitsRow* logits_row;
    i32 position;  // position of the token to be sampled
    const i32* history;
    const u32* slot_mask;  // allowed ids of the sequence slot
    const u8* stage;  // staged inputs; addresses of its regions are computed where they are read, to save registers
};

DEV ChunkLogits load_chunk(const LogitsRowView& row, u32 first) {
    ChunkLogits x;
    for (u32 j = 0; j < FOURS; ++j) x.v[j] = stored4(row, id4(first, j));
    return x;
}

// Returns the largest sort key among the ids of the chunk that this thread has.
DEV u64 first_of_chunk(const ChunkLogits& x, u32 first, u32 vocab) {
    u64 own = 0;
    for (u32 j = 0; j < FOURS; ++j)
        for (u32 i = 0; i < 4; ++i) {
            const u32 id = id4(first, j) + i;
            const u64 sort_key = id < vocab ? sort_key_of(x.v[j].v[i], id) : 0;
            own = sort_key > own ? sort_key : own;
        }
    return own;
}

DEV bool any_non_finite(const ChunkLogits& x, u32 first, u32 vocab) {
    bool non_finite = false;
    for (u32 j = 0; j < FOURS; ++j)
        for (u32 i = 0; i < 4; ++i) {
            const bool infinite_or_nan = (as_u32(x.v[j].v[i]) & 0x7fffffffu) >= 0x7f800000u;
            non_finite = non_finite || (infinite_or_nan && id4(first, j) + i < vocab);
        }
    return non_finite;
}

// Returns the sum of exp(x - most) over the logits x of the chunk.
DEV float mass_of(const ChunkLogits& x, float most) {
    float sum = 0.f;
    for (u32 j = 0; j < FOURS; ++j)
        for (u32 i = 0; i < 4; ++i) sum += exp_(x.v[j].v[i] - most);
    return block_sum(sum);
}

// Finds the winner of the chunk, the id with the largest logit + Gumbel noise, and stores it in `record`.
// Exact noise is computed only for ids for which logit + approximate noise is near the maximum.
DEV void find_gumbel_max(ChunkRecord* record, const ChunkLogits& x, u32 first, u32 vocab, u64 key, u32 position) {
    u32x4 words[FOURS];
    float top = -3.0e38f;
    IN_REGISTERS for (u32 j = 0; j < FOURS; ++j) {
        words[j] = philox(key, id4(first, j) / 4, DRAW_TOKEN, position);
        IN_REGISTERS for (u32 i = 0; i < 4; ++i) top = fmax_(top, x.v[j].v[i] + gumbel_approx(words[j].v[i]));
    }
    top = block_max(top);
    const float least = top - 2.f * GUMBEL_SLACK - 1e-6f * fabs_(top);
    u64 own = 0;
    float own_value = 0.f;
    IN_REGISTERS for (u32 j = 0; j < FOURS; ++j)
        IN_REGISTERS for (u32 i = 0; i < 4; ++i) {
            const u32 id = id4(first, j) + i;
            const float value = x.v[j].v[i];
            if (id >= vocab || !(value + gumbel_approx(words[j].v[i]) >= least)) continue;
            const u64 noisy = sort_key_of(value + gumbel(words[j].v[i]), id);
            if (noisy > own && noisy >= MIN_UNMASKED_KEY) {
                own = noisy;
                own_value = value;
            }
        }
    const u64 winner = block_max_key(own);
    if (winner == 0 ? tid() == 0 : own == winner) {
        record->winner = winner;
        record->winner_value = own_value;
    }
}

// Computes the statistics (`record`) of the chunk that begins at id `first` and has raw logits `x`. Writes
// the edited logits to `edited` if the filters will need them.
DEV void scan_chunk(ChunkRecord* record, float* edited, ChunkLogits x, u32 first, u32 vocab, const LogitsRowArgs& s) {
    const bool non_finite = any_non_finite(x, first, vocab);
    if (s.mode.needs_logprobs) {
        const float raw_best = value_of(block_max_key(first_of_chunk(x, first, vocab)));
        const float raw_mass = mass_of(x, raw_best);
        if (tid() == 0) {
            record->raw_best = raw_best;
            record->raw_mass = raw_mass;
        }
    }
    if (s.mode.masked) {
        const bool has_own = s.logits_row->mask_words > 0;
        mask_ids(x, first, has_own ? (const u32*)words_of(s.stage) + s.logits_row->mask_at : s.slot_mask, vocab);
    }
    if (s.mode.needs_token && s.logits_row->edits > 0)
        add_edits(x, first, edits_of(s.stage) + s.logits_row->edits_at, (u32)s.logits_row->edits, words_of(s.stage), s.history, s.position);
    if (s.mode.penalised) penalise_seen(x, first, *s.params, s.history, s.position);
    if (s.mode.edited && s.mode.has_filters)
        for (u32 j = 0; j < FOURS; ++j)
            if (id4(first, j) < vocab) *(f32x4*)(edited + id4(first, j)) = x.v[j];
    for (u32 j = 0; j < FOURS; ++j)
        for (u32 i = 0; i < 4; ++i) x.v[j].v[i] = mul_rounded(x.v[j].v[i], s.mode.factor);

    const u64 best = block_max_key(non_finite ? NON_FINITE_KEY : first_of_chunk(x, first, vocab));
    if (tid() == 0) record->best = best;
    if (s.mode.is_random) find_gumbel_max(record, x, first, vocab, s.params->key, (u32)s.position);
    if (s.mode.needs_masses) {
        const float mass = best < MIN_UNMASKED_KEY ? 0.f : mass_of(x, value_of(best));
        if (tid() == 0) record->mass = mass;
    }
}
