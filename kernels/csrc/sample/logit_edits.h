// logit_edits.h - edits of logits before sampling, for the chunk that a block has in registers. They are
// applied in this order: grammar bitmask, logit biases (minus infinity bans an id) in the order in which they
// were staged, penalties.
#pragma once
#include "sample/chunk.h"

enum : u32 { FOURS = CHUNK / SCAN_THREADS / 4 };  // groups of four ids per thread

// Returns the first of four successive ids: of the chunk that begins at id `first`, a thread processes ids
// id4(first, j) to id4(first, j) + 3 for each j < FOURS. This makes loads coalesced, with 16 bytes per
// thread.
DEV u32 id4(u32 first, u32 j) { return first + (j * SCAN_THREADS + tid()) * 4; }

// Logits of one chunk that a thread has in registers: four successive ids per vector.
struct ChunkLogits {
    f32x4 v[FOURS];
};

DEV void mask_ids(ChunkLogits& x, u32 first, const u32* mask, u32 vocab) {
    for (u32 j = 0; j < FOURS; ++j) {
        const u32 id = id4(first, j);
        const u32 bits = id < vocab ? mask[id / 32] >> (id % 32) : 0;
        for (u32 i = 0; i < 4; ++i)
            if (!(bits >> i & 1)) x.v[j].v[i] = minus_infinity();
    }
}

// Whether an edit applies at position `known_len`. An edit with when_len > 0 applies if the preceding tokens
// (`history`) end with the token ids of the edit; an edit with when_len < 0 applies at positions below
// when_at.
DEV bool applies(const StagedLogitEdit& edit, const i32* words, const i32* history, i32 known_len) {
    if (edit.when_len < 0) return known_len < edit.when_at;
    if (edit.when_len > known_len) return false;
    const i32* tail = history + (known_len - edit.when_len);
    for (i32 i = 0; i < edit.when_len; ++i)
        if (tail[i] != words[edit.when_at + i]) return false;
    return true;
}

// Adds the logit biases to the logits of a chunk. The edits are processed SCAN_THREADS at a time: those that
// concern ids of this chunk are collected in order in shared memory; then every thread applies the edits of
// the ids that it has.
DEV void add_edits(ChunkLogits& x, u32 first, const StagedLogitEdit* edits, u32 count, const i32* words, const i32* history,
                   i32 known_len) {
    SHARED(u32, ids, SCAN_THREADS);
    SHARED(float, values, SCAN_THREADS);
    for (u32 tile = 0; tile < count; tile += SCAN_THREADS) {
        StagedLogitEdit edit = {0, 0.f, 0, 0};
        bool in_chunk = false;
        if (tile + tid() < count) {
            edit = edits[tile + tid()];
            in_chunk = edit.id >= first && edit.id - first < CHUNK && applies(edit, words, history, known_len);
        }
        const PrefixSum found = block_prefix(in_chunk ? 1 : 0);
        if (in_chunk) {
            ids[found.before] = edit.id;
            values[found.before] = edit.value;
        }
        sync();
        for (u32 e = 0; e < found.total; ++e) {
            const u32 id = ids[e];
            for (u32 j = 0; j < FOURS; ++j)
                for (u32 i = 0; i < 4; ++i)
                    if (id4(first, j) + i == id) x.v[j].v[i] += values[e];
        }
        sync();
    }
}

DEV float penalise(float x, u32 count, const SequenceSamplingParams& params) {
    x = x > 0.f ? x / params.repetition : mul_rounded(x, params.repetition);
    return count == 0 ? x : x - mul_rounded(params.frequency, (float)count) - params.presence;
}

// Applies the repetition, frequency and presence penalties to the logits of a chunk. `seen` has one word for
// each id of the chunk: bit 31 is set if the id occurs in the prompt; the lower bits are its number of
// occurrences in the output.
DEV void penalise_seen(ChunkLogits& x, u32 first, const SequenceSamplingParams& params, const i32* history, i32 known_len) {
    SHARED(u32, seen, CHUNK);
    for (u32 i = tid(); i < CHUNK; i += SCAN_THREADS) seen[i] = 0;
    sync();
    const i32 prompt = params.prompt_len < known_len ? params.prompt_len : known_len;
    for (i32 i = (i32)tid(); i < prompt; i += SCAN_THREADS) {
        const u32 at = (u32)history[i] - first;
        if (at < CHUNK) atomic_max(&seen[at], 0x80000000u);
    }
    sync();
    for (i32 i = (prompt > 0 ? prompt : 0) + (i32)tid(); i < known_len; i += SCAN_THREADS) {
        const u32 at = (u32)history[i] - first;
        if (at < CHUNK) atomic_add(&seen[at], 1u);
    }
    sync();
    for (u32 j = 0; j < FOURS; ++j)
        for (u32 i = 0; i < 4; ++i) {
            const u32 times_seen = seen[id4(first, j) + i - first];
            if (times_seen != 0) x.v[j].v[i] = penalise(x.v[j].v[i], times_seen & 0x7fffffffu, params);
        }
    sync();
}
