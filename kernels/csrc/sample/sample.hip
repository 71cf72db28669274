// sample.hip - samples the logits rows of a step. CPU reference: cpu/step.rs (`RowSampling`) and cpu/sample,
// with the same steps: mask, edits, penalties, temperature, min-p, top-k, top-p, then the id with the largest
// value + Gumbel noise, or with the largest value if the temperature is below 1e-5 (greedy).
// Log-probabilities, rank and top ids are those of the raw logits.
//
// sample_scan           reads logits f32 [logits_rows, vocab] once, in chunks of 2048 ids, into records
//                       [logits_rows, chunks]; if a row has both edits and filters, its edited logits are
//                       written to edited f32 [logits_rows, edited_stride]. With vocab-parallel sampling a
//                       rank has only the logits of ids [first, end), first a multiple of 64;
//                       sample_vocab_parallel continues from the records. Grid: (blocks per logits row,
//                       logits rows); the result does not depend on the number of blocks per row. Block: 256.
// sample_pick           chooses the tokens from the records: sampled [logits_rows] of SampledToken; top_ids
//                       i32, top_logprobs f32 [logits_rows, most]. Updates the newest token of the sequence
//                       slot, unless draft verification does, and the history. Grid: logits rows. Block: 512.
//                       It reads logits again only if filters, ranks or top ids need it, and then only chunks
//                       with a logit above the limit.
// sample_verify_drafts accepts or rejects draft tokens: a draft is accepted if it equals the sampled token
//                      (per_mille < 0), or at random: draft i of a row with the probability
//                      (per_mille - i * per_mille_decrease) / 1000. Logits rows after a rejected draft are
//                      void; the last valid token becomes the newest token of the sequence slot. The logits
//                      rows of a row are consecutive, possibly across several launches. Grid: blocks of 256
//                      over logits rows.
// positions i32 [tokens] are those of the step's tokens; a sampled token is at the next position.
// vocab <= 262,144; most <= 1024. Logits rows beyond those of the stage buffer, or with token -1, are
// padding: their result is token -1, and no slot is changed.
//
// Greedy tokens equal the CPU's. Sampled tokens differ only where the last bits of the noise, of a
// probability or of the top-p sum decide. Roofline: bytes of a row (0.6 MB at 151,936 ids), read once, over
// memory bandwidth. Sampling without filters adds 40 instructions per id; top-p on average reads the row
// about once more.
#include "dev.h"
#include "sample/filters.h"
#include "sample/logits_row.h"
#include "sample/scan.h"

KERNEL(SCAN_THREADS)
sample_scan(u8* records, float* edited, const float* logits, const u8* stage, const i32* positions, const i32* history,
            const u32* masks, const u8* slot_params, u32 vocab, u32 first, u32 end, u32 stride, u32 edited_stride, u32 history_len,
            u32 mask_words) {
    grid_wait();
    grid_launch_dependents();
    const u32 q = bid_y();
    const LogitsRowView raw = row_of(logits + (u64)q * stride, 1.f, first, end);
    const u32 chunks = chunks_of(raw);
    ChunkLogits next = load_chunk(raw, first + bid_x() * CHUNK);  // Issued before its parameters are read.
    if (is_padding(stage, q)) return;
    LogitsRowArgs s;
    s.logits_row = logits_rows_of(stage) + q;
    s.params = &params_of(*s.logits_row, slot_params);
    s.position = position_of(*s.logits_row, positions);
    s.mode = sampling_mode_of(*s.logits_row, *s.params, vocab, s.position);
    if (!s.mode.needs_token && !s.mode.needs_logprobs) return;
    const u64 seq_slot = s.mode.needs_token ? (u64)s.logits_row->seq_slot : 0;
    s.history = history + seq_slot * history_len;
    s.stage = stage;
    s.slot_mask = masks + seq_slot * mask_words;
    ChunkRecord* own = (ChunkRecord*)records + (u64)q * chunks;
    for (u32 c = bid_x(); c < chunks; c += gdim_x()) {
        const ChunkLogits x = next;
        if (c + gdim_x() < chunks) next = load_chunk(raw, first + (c + gdim_x()) * CHUNK);
        scan_chunk(own + c, edited + (u64)q * edited_stride - first, x, first + c * CHUNK, end, s);
    }
}
EXPORT(sample_scan)

// Computes, from the raw logits (before edits and temperature), the log-probability and rank of the token,
// and the `top` most likely ids with their log-probabilities.
DEV void compute_logprobs(LogitsSearchScratch& search, SampledToken& output, i32* top_ids, float* top_logprobs,
                          const ChunkRecord* records, const LogitsRowView& raw, u32 top) {
    const u32 chunks = chunks_of(raw);
    const bool holds = tid() < chunks;
    const float chunk_best = holds ? records[tid()].raw_best : -3.0e38f;
    const float best = block_max(chunk_best);
    const float mass = block_sum(holds ? records[tid()].raw_mass * exp_(chunk_best - best) : 0.f);
    const float log_sum = best + ln(mass);
    if (holds) search.order[tid()] = order_of(chunk_best);
    sync();
    const float logit = raw.values[output.token];
    output.logprob = logit - log_sum;
    output.rank = count_from(search, raw, sort_key_of(logit, (u32)output.token) + 1) + 1;
    if (top == 0) return;
    const u64 last = kth_sort_key(search, raw, top, kth_lower_bound(search, chunks, top));
    const u32 n = gather(search, raw, last > MIN_UNMASKED_KEY ? last : MIN_UNMASKED_KEY, NON_FINITE_KEY);
    sort_list(search, n);
    for (u32 i = tid(); i < n; i += bdim()) {
        top_ids[i] = (i32)id_of(search.sorted[i]);
        top_logprobs[i] = value_of(search.sorted[i]) - log_sum;
    }
}

// Samples a token, or takes the most likely one if sampling is greedy. Returns SAMPLE_OK, or the reason why
// no token can be sampled: SAMPLE_NON_FINITE or SAMPLE_ALL_MASKED.
DEV u32 select_token(LogitsSearchScratch& search, ChunkWinners& winners, i32& token, const ChunkRecord* records,
                     const LogitsRowView& row, const SamplingMode& mode, const SequenceSamplingParams& params,
                     const GumbelNoiseKey& draw) {
    const bool holds = tid() < chunks_of(row);
    const u64 chunk_best = holds ? records[tid()].best : 0;
    const u64 best = block_max_key(chunk_best);
    if (best < MIN_UNMASKED_KEY) return SAMPLE_ALL_MASKED;
    if (!mode.is_random) {
        token = (i32)id_of(best);
        return SAMPLE_OK;
    }
    if (holds) {
        search.order[tid()] = (u32)(chunk_best >> 32);
        winners.noisy[tid()] = records[tid()].winner;
        winners.value[tid()] = records[tid()].winner_value;
    }
    sync();
    if (!mode.has_filters) {
        token = (i32)id_of(block_max_key(holds ? winners.noisy[tid()] : 0));
        return SAMPLE_OK;
    }
    float total = 0.f;
    if (mode.needs_masses) {
        const bool included = holds && chunk_best >= MIN_UNMASKED_KEY;
        total = block_sum(included ? records[tid()].mass * exp_(value_of(chunk_best) - value_of(best)) : 0.f);
    }
    token = (i32)sample_with_filters(search, winners, row, params, draw, best, total);
    return SAMPLE_OK;
}

KERNEL(PICK_THREADS)
sample_pick(u8* sampled, i32* top_ids, float* top_logprobs, u8* latest, i32* history, const u8* records,
            const float* edited, const float* logits, const u8* stage, const i32* positions, const u8* slot_params, u32 vocab,
            u32 stride, u32 edited_stride, u32 history_len, u32 most) {
    SHARED(LogitsSearchScratch, search, 1);
    SHARED(ChunkWinners, winners, 1);
    grid_wait();
    grid_launch_dependents();
    const u64 q = bid_x();
    SampledToken output = {-1, SAMPLE_OK, 0.f, 0};
    if (is_padding(stage, (u32)q)) {
        if (tid() == 0) ((SampledToken*)sampled)[q] = output;
        return;
    }
    const StagedLogitsRow& logits_row = logits_rows_of(stage)[q];
    const SequenceSamplingParams& params = params_of(logits_row, slot_params);
    const SamplingMode mode = sampling_mode_of(logits_row, params, vocab, position_of(logits_row, positions));
    const u32 chunks = chunks_of(vocab);
    const ChunkRecord* own = (const ChunkRecord*)records + q * chunks;

    i32 token = logits_row.known_token;
    if (mode.needs_token || mode.needs_logprobs) {
        const bool non_finite = tid() < chunks && own[tid()].best == NON_FINITE_KEY;
        if (block_max(non_finite ? 1u : 0u) != 0) output.status = SAMPLE_NON_FINITE;
    }
    if (output.status == SAMPLE_OK && mode.needs_token) {
        const bool stored = mode.edited && mode.has_filters;
        const LogitsRowView row = row_of(stored ? edited + q * edited_stride : logits + q * stride, mode.factor, 0,
                                         vocab);
        output.status = select_token(*search, *winners, token, own, row, mode, params,
                               GumbelNoiseKey{params.key, (u32)position_of(logits_row, positions)});
    }
    if (output.status == SAMPLE_OK) {
        output.token = token;
        if (mode.needs_logprobs) {
            const u32 top = (u32)logits_row.top < most ? (u32)logits_row.top : most;
            compute_logprobs(*search, output, top_ids + q * most, top_logprobs + q * most, own,
                  row_of(logits + q * stride, 1.f, 0, vocab), top);
        }
    }
    if (tid() != 0) return;
    ((SampledToken*)sampled)[q] = output;
    if (mode.needs_token)
        update_latest_token(LatestTokenArrays{latest, history, history_len}, logits_row, params, output, position_of(logits_row, positions));
}
EXPORT(sample_pick)

KERNEL(256)
sample_verify_drafts(u8* sampled, u8* latest, i32* history, const i32* ids, const i32* positions, const u8* stage, const u8* slot_params,
                     u32 logits_rows, u32 history_len, i32 per_mille, i32 per_mille_decrease) {
    grid_wait();
    grid_launch_dependents();
    const u32 first = bid_x() * bdim() + tid(), staged = header_of(stage)->logits_rows;
    const u32 end = logits_rows < staged ? logits_rows : staged;
    if (first >= end || is_padding(stage, first)) return;
    const StagedLogitsRow* staged_rows = logits_rows_of(stage);
    // A row of the step has one logits row per draft token and one more. One thread verifies all logits rows
    // of a row of the step: the thread of its first logits row, or of its first logits row in this launch.
    if (!needs_draft_verification(staged_rows[first]) || (staged_rows[first].draft_index > 0 && first > 0)) return;
    const i32 seq_slot = staged_rows[first].seq_slot;
    const SequenceSamplingParams& params = ((const SequenceSamplingParams*)slot_params)[seq_slot];
    LatestToken own = ((LatestToken*)latest)[seq_slot];
    bool preceding_accepted = staged_rows[first].draft_index == 0 || own.draft_accepted != 0;
    for (u32 q = first; q < end && preceding_accepted && (q == first || staged_rows[q].draft_index > 0); ++q) {
        SampledToken& output = ((SampledToken*)sampled)[q];
        const i32 position = position_of(staged_rows[q], positions);
        const bool is_sampled = output.status == SAMPLE_OK;
        bool accepted = is_sampled && staged_rows[q].has_draft != 0;
        if (accepted) {
            const i32 draft = ids[staged_rows[q].token + 1];
            if (per_mille < 0) accepted = draft == output.token;
            else {
                const i32 chance = per_mille - per_mille_decrease * staged_rows[q].draft_index;
                accepted = mul_rounded(uniform(philox(params.key, 0, DRAW_ACCEPT, (u32)position).v[0]), 1000.f) < (float)chance;
            }
            if (accepted) {
                output.token = draft;
                output.status = SAMPLE_DRAFT_ACCEPTED;
                if ((params.flags & RULE_HISTORY) != 0 && (u32)position < history_len)
                    history[(u64)seq_slot * history_len + position] = draft;
            }
        }
        // If sampling failed after accepted draft tokens, the last accepted token remains the newest token of
        // the sequence slot.
        if (is_sampled || staged_rows[q].draft_index == 0) own = LatestToken{is_sampled ? output.token : 0, position, 0};
        own.draft_accepted = accepted ? 1 : 0;
        preceding_accepted = accepted;
    }
    ((LatestToken*)latest)[seq_slot] = own;
}
EXPORT(sample_verify_drafts)
