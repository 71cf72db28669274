// sample_vocab_parallel.hip - vocab-parallel (sharded) sampling: each rank has the logits of a part of the
// vocabulary; all ranks exchange a few candidate ids per logits row, and each rank computes the same result
// from them. CPU reference: cpu/sample/vocab_parallel. Sizes do not depend on the sampling parameters, so
// that the launches can be captured. Therefore only rows without filters, or with a top-k of up to `listed`
// ids (optionally with min-p and top-p), are supported, without log-probabilities.
//
// sample_scan             runs first, over this rank's ids: records and edited logits; see sample.hip.
// sample_verify_drafts    runs after vocab_shard_merge, if there are draft tokens.
// vocab_shard_candidates writes candidates u64 [logits_rows, 2 + listed] of this rank's ids [first, end), as
//                        sort keys (sample/order.h): the largest sort key after edits and temperature
//                        (NON_FINITE_KEY if a raw logit is NaN or infinite), the sort key of the largest value +
//                        Gumbel noise, and, unordered, the sort keys of the top-k ids, followed by zeros. Grid:
//                        logits rows. Block: 512. Logits are read again (twice) only for a top-k.
// vocab_shard_merge       chooses the tokens from the candidates of all ranks, `all` u64 [ranks, logits_rows,
//                         2 + listed]: sampled [logits_rows] of SampledToken. Updates the newest token of the
//                         sequence slot, unless draft verification does, and the history. Grid: logits rows.
//                         Block: 512. ranks * listed <= 1024, listed <= 512.
//
// Every rank merges the same words with the same code, so that all have the same bits. Tokens are those of
// sample_pick, except that with both top-k and top-p the probability mass is added in another order.
// Roofline: bound by latency, as the data is small; a top-k reads the shard twice, mostly from cache.
#include "dev.h"
#include "sample/filters.h"
#include "sample/logits_row.h"

// Indices in the message of a rank for a logits row: the largest sort key (BEST), the sort key of the largest
// logit + Gumbel noise (WINNER), then the list of top-k sort keys.
enum : u32 { BEST = 0, WINNER = 1, LISTED_FROM = 2 };

// Returns a lower bound of the k-th largest sort key of the row, for k <= PICK_THREADS: each thread finds the
// largest logit among a part of the ids, and the k-th largest of these logits is the bound. It is valid only
// if at least k ids are unmasked.
DEV u64 bound_by_threads(LogitsSearchScratch& search, const LogitsRowView& row, u32 k) {
    u32 own = 0;
    each_from(search, row, MIN_UNMASKED_KEY, [&](u64 sort_key, float) {
        const u32 order = (u32)(sort_key >> 32);
        own = order > own ? order : own;
    });
    search.bins[tid()] = own;
    sync();
    u32 before = 0;
    for (u32 t = 0; t < bdim(); ++t) before += search.bins[t] > own || (search.bins[t] == own && t < tid());
    if (before == k - 1) search.sort_key = (u64)own << 32;
    sync();
    const u64 bound = search.sort_key;
    sync();
    return bound > MIN_UNMASKED_KEY ? bound : MIN_UNMASKED_KEY;
}

// Writes to `to` the k largest sort keys of unmasked ids of the row (or all of them, if there are fewer than
// k), followed by zeros up to `listed` entries.
DEV void put_first_candidate(u64* to, LogitsSearchScratch& search, const LogitsRowView& row, u32 k, u32 listed) {
    const u64 last = kth_sort_key(search, row, k, bound_by_threads(search, row, k));
    const u32 n = gather(search, row, last > MIN_UNMASKED_KEY ? last : MIN_UNMASKED_KEY, NON_FINITE_KEY);
    for (u32 i = tid(); i < listed; i += bdim()) to[i] = i < n ? search.list[i] : 0;
}

KERNEL(PICK_THREADS)
vocab_shard_candidates(u64* candidates, const u8* records, const float* edited, const float* logits, const u8* stage, const i32* positions,
                       const u8* slot_params, u32 vocab, u32 first, u32 end, u32 stride, u32 edited_stride, u32 listed) {
    SHARED(LogitsSearchScratch, search, 1);
    grid_wait();
    grid_launch_dependents();
    const u64 q = bid_x();
    u64* to = candidates + q * (LISTED_FROM + listed);
    u32 k = 0;
    if (!is_padding(stage, (u32)q)) {
        const StagedLogitsRow& logits_row = logits_rows_of(stage)[q];
        const SequenceSamplingParams& params = params_of(logits_row, slot_params);
        const SamplingMode mode = sampling_mode_of(logits_row, params, vocab, position_of(logits_row, positions));
        const u32 chunks = chunks_of(end - first);
        const ChunkRecord* own = (const ChunkRecord*)records + q * chunks;
        const bool holds = mode.needs_token && tid() < chunks;
        const u64 chunk_best = holds ? own[tid()].best : 0;
        const u64 best = block_max_key(chunk_best);
        const u64 winner = block_max_key(holds && mode.is_random ? own[tid()].winner : 0);
        if (tid() == 0) to[BEST] = best, to[WINNER] = winner;
        if (mode.has_filters && best >= MIN_UNMASKED_KEY && best != NON_FINITE_KEY)
            k = (u32)params.top_k < listed ? (u32)params.top_k : listed;
        if (k > 0) {
            if (holds) search->order[tid()] = (u32)(chunk_best >> 32);
            sync();
            const float* row = mode.edited ? edited + q * edited_stride : logits + q * stride;
            put_first_candidate(to + LISTED_FROM, *search, row_of(row, mode.factor, first, end), k, listed);
        }
    } else if (tid() == 0) {
        to[BEST] = to[WINNER] = 0;
    }
    if (k == 0)
        for (u32 i = tid(); i < listed; i += bdim()) to[LISTED_FROM + i] = 0;
}
EXPORT(vocab_shard_candidates)

// Candidates for one logits row from all ranks.
struct CandidateList {
    const u64* first_rank;   // words of rank 0
    u32 ranks, rank_stride;  // rank_stride: distance between ranks, in words
    u32 listed;
};

// Returns the largest sort key at index `at` (BEST or WINNER) of the messages of all ranks.
DEV u64 first_of(const CandidateList& candidates, u32 at) {
    u64 first = 0;
    for (u32 r = 0; r < candidates.ranks; ++r) {
        const u64 sort_key = candidates.first_rank[(u64)r * candidates.rank_stride + at];
        first = sort_key > first ? sort_key : first;
    }
    return first;
}

// Sorts the top-k sort keys that all ranks have sent for the row into search.sorted. Returns their number.
DEV u32 sort_candidates(LogitsSearchScratch& search, const CandidateList& candidates) {
    if (tid() == 0) search.found = 0;
    sync();
    for (u32 i = tid(); i < candidates.ranks * candidates.listed; i += bdim()) {
        const u64 sort_key = candidates.first_rank[(u64)(i / candidates.listed) * candidates.rank_stride + LISTED_FROM + i % candidates.listed];
        if (sort_key != 0) search.list[atomic_add(&search.found, 1u)] = sort_key;
    }
    sync();
    const u32 n = search.found;
    sort_list(search, n);
    return n;
}

DEV u32 word_of(const u32x4& words, u32 i) { return i == 0 ? words.v[0] : i == 1 ? words.v[1] : i == 2 ? words.v[2] : words.v[3]; }

// Samples a token among the top_k largest candidates, without those that min-p or top-p remove. Top-p keeps
// an id if the probability mass of the ids with larger sort keys is less than top-p.
DEV u32 sample_candidates(LogitsSearchScratch& search, const CandidateList& candidates, const SequenceSamplingParams& params,
                          const GumbelNoiseKey& draw) {
    const u32 n = sort_candidates(search, candidates), i = tid();
    const u32 k = n < (u32)params.top_k ? n : (u32)params.top_k;
    const float most = value_of(search.sorted[0]);
    const bool kept = i < k && (i == 0 || search.sorted[i] >= min_p_floor(params, most));
    const u64 sort_key = kept ? search.sorted[i] : 0;
    if (i < k) search.bins[i] = kept ? as_u32(exp_(value_of(sort_key) - most)) : 0;
    sync();
    float before = 0.f, total = 0.f;
    for (u32 j = 0; j < k; ++j) {
        if (j == i) before = total;
        total += as_f32(search.bins[j]);
    }
    u64 noisy = 0;
    if (kept && (i == 0 || params.top_p >= 1.f || before < total * params.top_p)) {
        const u32 id = id_of(sort_key);
        noisy = sort_key_of(value_of(sort_key) + gumbel(word_of(philox(draw.key, id / 4, DRAW_TOKEN, draw.position), id % 4)), id);
    }
    return id_of(block_max_key(noisy));
}

// Samples a token from the candidates of all ranks, or takes the most likely one if sampling is greedy.
// Returns SAMPLE_OK, or the reason why no token can be sampled: SAMPLE_NON_FINITE or SAMPLE_ALL_MASKED.
DEV u32 select_candidate(LogitsSearchScratch& search, i32& token, const CandidateList& candidates, const SamplingMode& mode,
                         const SequenceSamplingParams& params, const GumbelNoiseKey& draw) {
    const u64 best = first_of(candidates, BEST);
    if (best == NON_FINITE_KEY) return SAMPLE_NON_FINITE;
    if (best < MIN_UNMASKED_KEY) return SAMPLE_ALL_MASKED;
    if (mode.has_filters)
        token = (i32)sample_candidates(search, candidates, params, draw);
    else
        token = (i32)id_of(mode.is_random ? first_of(candidates, WINNER) : best);
    return SAMPLE_OK;
}

KERNEL(PICK_THREADS)
vocab_shard_merge(u8* sampled, u8* latest, i32* history, const u64* all, const u8* stage, const i32* positions, const u8* slot_params,
                  u32 vocab, u32 ranks, u32 listed, u32 history_len) {
    SHARED(LogitsSearchScratch, search, 1);
    grid_wait();
    grid_launch_dependents();
    const u64 q = bid_x(), words = LISTED_FROM + listed;
    SampledToken output = {-1, SAMPLE_OK, 0.f, 0};
    if (is_padding(stage, (u32)q)) {
        if (tid() == 0) ((SampledToken*)sampled)[q] = output;
        return;
    }
    const StagedLogitsRow& logits_row = logits_rows_of(stage)[q];
    const SequenceSamplingParams& params = params_of(logits_row, slot_params);
    const i32 position = position_of(logits_row, positions);
    const SamplingMode mode = sampling_mode_of(logits_row, params, vocab, position);
    i32 token = logits_row.known_token;
    if (mode.needs_token) {
        const CandidateList candidates = {all + q * words, ranks, (u32)(gdim_x() * words), listed};
        output.status = select_candidate(*search, token, candidates, mode, params, GumbelNoiseKey{params.key, (u32)position});
    }
    if (output.status == SAMPLE_OK) output.token = token;
    if (tid() != 0) return;
    ((SampledToken*)sampled)[q] = output;
    if (mode.needs_token) update_latest_token(LatestTokenArrays{latest, history, history_len}, logits_row, params, output, position);
}
EXPORT(vocab_shard_merge)
