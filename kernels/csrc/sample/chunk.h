// chunk.h - division of logits rows into chunks of 2048 token ids, and the statistics of each chunk
// (ChunkRecord).
//
// Sums and choices are computed per chunk, and then over the chunks in order, so that they do not depend on
// the number of blocks per row. A chunk is also the unit that is skipped if all its logits are below a
// cutoff.
#pragma once
#include "prepare/prepare.h"
#include "sample/order.h"
#include "sample/philox.h"

enum : u32 {
    CHUNK = 2048,        // ids per chunk
    MAX_CHUNKS = 256,    // rows of up to 524,288 ids
    SCAN_THREADS = 256,  // block size of kernels that scan chunks
    PICK_THREADS = 512,  // block size of kernels that select a token
};

#define GREEDY_BELOW 1e-5f

// Statistics of one chunk (CHUNK ids) of a logits row, computed by sample_scan.
struct ChunkRecord {
    u64 best;            // largest sort key after edits and temperature, or NON_FINITE_KEY (order.h)
    u64 winner;          // sort key of the largest value with Gumbel noise, if the token is sampled
    float winner_value;  // value of the winner without the noise
    float mass;          // sum of exp(value - best value), if top-p needs it
    float raw_best, raw_mass;  // largest raw logit, sum of exp(logit - raw_best); if requested
};

// The computations that sampling one logits row needs, derived from its sampling parameters.
struct SamplingMode {
    bool needs_token;     // a token must be chosen; false: at most the log-probability of known_token
    bool needs_logprobs;  // log-probabilities are requested
    bool is_random;       // sampled, not greedy
    bool masked, penalised, edited;  // mask, penalties, or any edits change logits
    bool has_filters;     // some ids are cut off before sampling (top-k, top-p, min-p)
    bool needs_masses;    // top-p needs probabilities
    float factor;  // inverse temperature, by which edited logits are multiplied
};

// Returns the computations that sampling a logits row needs. `position`: position of the token to be sampled.
// `vocab`: vocabulary size.
DEV SamplingMode sampling_mode_of(const StagedLogitsRow& logits_row, const SequenceSamplingParams& params, u32 vocab, i32 position) {
    SamplingMode c;
    c.needs_token = logits_row.known_token < 0;
    c.needs_logprobs = logits_row.top >= 0;
    c.is_random = c.needs_token && params.temperature >= GREEDY_BELOW;
    c.masked = c.needs_token && (logits_row.mask_words > 0 || (params.flags & RULE_MASKED) != 0);
    c.penalised = c.needs_token && (params.flags & RULE_HISTORY) != 0 && position > 0 &&
                  (params.repetition != 1.f || params.frequency != 0.f || params.presence != 0.f);
    c.edited = c.masked || c.penalised || (c.needs_token && logits_row.edits > 0);
    c.needs_masses = c.is_random && params.top_p < 1.f;
    c.has_filters = c.needs_masses || (c.is_random && (params.min_p > 0.f || (params.top_k > 0 && (u32)params.top_k < vocab)));
    c.factor = c.is_random ? 1.f / params.temperature : 1.f;
    return c;
}

DEV u32 chunks_of(u32 ids) { return (ids + CHUNK - 1) / CHUNK; }
DEV float minus_infinity() { return as_f32(0xff800000u); }

// View of the logits of token ids [first, end) of one logits row in global memory; `first` is a multiple of
// 4. Chunk 0 begins at id `first`.
struct LogitsRowView {
    const float* values;  // address of id 0's value, which may be outside the row's memory
    float factor;
    u32 first, end;
    bool aligned;  // 16-byte loads are allowed
};
// Returns the view of a logits row; `values` is the address of the logit of id `first`.
DEV LogitsRowView row_of(const float* values, float factor, u32 first, u32 end) {
    return LogitsRowView{values - first, factor, first, end, ((u64)values & 15) == 0};
}
DEV u32 chunks_of(const LogitsRowView& row) { return chunks_of(row.end - row.first); }

// Returns the logits of ids [id, id + 4) as stored, without the factor of the row. `id` is a multiple of 4.
// Ids from row.end on have minus infinity.
DEV f32x4 stored4(const LogitsRowView& row, u32 id) {
    if (row.aligned && id + 4 <= row.end) return *(const f32x4*)(row.values + id);
    f32x4 r;
    for (u32 i = 0; i < 4; ++i) r.v[i] = id + i < row.end ? row.values[id + i] : minus_infinity();
    return r;
}
// Returns the logits of ids [id, id + 4) multiplied by row.factor (the inverse temperature).
DEV f32x4 values4(const LogitsRowView& row, u32 id) {
    f32x4 r = stored4(row, id);
    for (u32 i = 0; i < 4; ++i) r.v[i] = mul_rounded(r.v[i], row.factor);
    return r;
}
