// sample.hip - samples the logits rows of a step. CPU reference: cpu/step.rs (`RowSampling`) and cpu/sample,
// with the same rules: mask, edits, penalties, temperature, min-p, top-k, top-p, then the largest value with
// Gumbel noise, or the largest value below temperature 1e-5 (greedy); log-probabilities, rank and top ids of
// the raw logits.
//
// sample_scan           reads logits f32 [questions, vocab] once, in chunks of 2048 ids, into records
//                       [questions, chunks]; if cutoffs follow edits, the edited logits are written to edited
//                       f32 [questions, edited_stride]. It may have only the logits of ids [first, end),
//                       first a multiple of 64 (vocab-parallel sampling): see sample_vocab_parallel, which
//                       continues from there. Grid: blocks per logits row x logits rows; the result does not
//                       depend on the former. Block: 256.
// sample_pick           answers [questions, 4 words]; top_ids i32, top_logprobs f32 [questions, most];
//                       updates the newest token of the sequence slot, unless draft verification does, and
//                       the history. Grid: logits rows. Block: 512. Reads logits again only if cutoffs, ranks
//                       or top lists need it, and then only chunks that reach the limit.
// sample_verify_drafts  accepts or rejects draft tokens: a draft is accepted if it equals the sampled token
// (per_mille < 0), or at random with that rate; logits rows after a rejected draft are void. The last valid
// token is the newest token of the sequence slot. The logits rows of a row are consecutive, possibly across
// several launches. Grid: blocks of 256 over logits rows.
// positions i32 [T] are those of the step's tokens: a sampled token is at the next position.
// vocab <= 262,144; most <= 1024. Logits rows beyond those of the stage buffer, or with token -1, are
// padding: token -1, no slot changed.
//
// Greedy tokens equal the CPU's. Sampled tokens differ only where the last bits of noise, of a probability or
// of a cutoff's sum decide. Roofline: the row once over bandwidth (0.6 MB at 151,936 ids); sampling without
// cutoffs adds 40 instructions per id; top-p adds on average about one more reading.
#include "dev.h"
#include "sample/filters.h"
#include "sample/logits_row.h"
#include "sample/scan.h"

KERNEL(SCAN_THREADS)
sample_scan(u8* records, float* edited, const float* logits, const u8* stage, const i32* positions, const i32* history,
            const u32* masks, const u8* rules, u32 vocab, u32 first, u32 end, u32 stride, u32 edited_stride, u32 history_len,
            u32 mask_words) {
    grid_wait();
    grid_release();
    const u32 q = bid_y();
    const Row raw = row_of(logits + (u64)q * stride, 1.f, first, end);
    const u32 chunks = chunks_of(raw);
    Held next = load_chunk(raw, first + bid_x() * CHUNK);  // Issued before the logits row's parameters are read.
    if (is_padding(stage, q)) return;
    Scanned s;
    s.question = questions_of(stage) + q;
    s.rules = &rules_of(*s.question, rules);
    s.position = position_of(*s.question, positions);
    s.choice = choice_of(*s.question, *s.rules, vocab, s.position);
    if (!s.choice.chooses && !s.choice.scores) return;
    const u64 seat = s.choice.chooses ? (u64)s.question->seat : 0;
    s.history = history + seat * history_len;
    s.mask = masks + seat * mask_words;
    s.words = words_of(stage);
    s.edits = edits_of(stage) + s.question->edits_at;
    ChunkRecord* own = (ChunkRecord*)records + (u64)q * chunks;
    for (u32 c = bid_x(); c < chunks; c += gdim_x()) {
        const Held x = next;
        if (c + gdim_x() < chunks) next = load_chunk(raw, first + (c + gdim_x()) * CHUNK);
        scan_chunk(own + c, edited + (u64)q * edited_stride - first, x, first + c * CHUNK, end, s);
    }
}
EXPORT(sample_scan)

// Log-probability of the token in the raw row, its rank, and the `top` most probable ids.
DEV void score(Search& search, SampledToken& answer, i32* top_ids, float* top_logprobs, const ChunkRecord* records,
               const Row& raw, u32 top) {
    const u32 chunks = chunks_of(raw);
    const bool holds = tid() < chunks;
    const float chunk_best = holds ? records[tid()].raw_best : -3.0e38f;
    const float best = block_max(chunk_best);
    const float mass = block_sum(holds ? records[tid()].raw_mass * exp_(chunk_best - best) : 0.f);
    const float log_sum = best + ln(mass);
    if (holds) search.order[tid()] = order_of(chunk_best);
    sync();
    const float logit = raw.values[answer.token];
    answer.logprob = logit - log_sum;
    answer.rank = count_from(search, raw, place_of(logit, (u32)answer.token) + 1) + 1;
    if (top == 0) return;
    const u64 last = kth_place(search, raw, top, bound_for(search, chunks, top));
    const u32 n = gather(search, raw, last > LAST_UNMASKED ? last : LAST_UNMASKED, STRANGE);
    sort_list(search, n);
    for (u32 i = tid(); i < n; i += bdim()) {
        top_ids[i] = (i32)id_of(search.sorted[i]);
        top_logprobs[i] = value_of(search.sorted[i]) - log_sum;
    }
}

// Chooses a token under the sampling parameters, or returns the status that explains why there is none.
DEV u32 choose(Search& search, Winners& winners, i32& token, const ChunkRecord* records, const Row& row,
               const Choice& choice, const SequenceSamplingParams& rules, const Draw& draw) {
    const bool holds = tid() < chunks_of(row);
    const u64 chunk_best = holds ? records[tid()].best : 0;
    const u64 best = block_first(chunk_best);
    if (best < LAST_UNMASKED) return SAMPLE_ALL_MASKED;
    if (!choice.draws) {
        token = (i32)id_of(best);
        return SAMPLE_OK;
    }
    if (holds) {
        search.order[tid()] = (u32)(chunk_best >> 32);
        winners.noisy[tid()] = records[tid()].winner;
        winners.value[tid()] = records[tid()].winner_value;
    }
    sync();
    if (!choice.cuts) {
        token = (i32)id_of(block_first(holds ? winners.noisy[tid()] : 0));
        return SAMPLE_OK;
    }
    float total = 0.f;
    if (choice.weighs) {
        const bool weighed = holds && chunk_best >= LAST_UNMASKED;
        total = block_sum(weighed ? records[tid()].mass * exp_(value_of(chunk_best) - value_of(best)) : 0.f);
    }
    token = (i32)sample_with_filters(search, winners, row, rules, draw, best, total);
    return SAMPLE_OK;
}

KERNEL(PICK_THREADS)
sample_pick(u8* answers, i32* top_ids, float* top_logprobs, u8* newest, i32* history, const u8* records,
            const float* edited, const float* logits, const u8* stage, const i32* positions, const u8* rules, u32 vocab,
            u32 stride, u32 edited_stride, u32 history_len, u32 most) {
    SHARED(Search, search, 1);
    SHARED(Winners, winners, 1);
    grid_wait();
    grid_release();
    const u64 q = bid_x();
    SampledToken answer = {-1, SAMPLE_OK, 0.f, 0};
    if (is_padding(stage, (u32)q)) {
        if (tid() == 0) ((SampledToken*)answers)[q] = answer;
        return;
    }
    const StageLogitsRow& question = questions_of(stage)[q];
    const SequenceSamplingParams& seat_rules = rules_of(question, rules);
    const Choice choice = choice_of(question, seat_rules, vocab, position_of(question, positions));
    const u32 chunks = chunks_of(vocab);
    const ChunkRecord* own = (const ChunkRecord*)records + q * chunks;

    i32 token = question.known;
    if (choice.chooses || choice.scores) {
        const bool strange = tid() < chunks && own[tid()].best == STRANGE;
        if (block_max(strange ? 1u : 0u) != 0) answer.status = SAMPLE_NON_FINITE;
    }
    if (answer.status == SAMPLE_OK && choice.chooses) {
        const bool stored = choice.edited && choice.cuts;
        const Row row = row_of(stored ? edited + q * edited_stride : logits + q * stride, choice.factor, 0, vocab);
        answer.status = choose(*search, *winners, token, own, row, choice, seat_rules,
                               Draw{seat_rules.key, (u32)position_of(question, positions)});
    }
    if (answer.status == SAMPLE_OK) {
        answer.token = token;
        if (choice.scores) {
            const u32 top = (u32)question.top < most ? (u32)question.top : most;
            score(*search, answer, top_ids + q * most, top_logprobs + q * most, own,
                  row_of(logits + q * stride, 1.f, 0, vocab), top);
        }
    }
    if (tid() != 0) return;
    ((SampledToken*)answers)[q] = answer;
    if (choice.chooses)
        update_latest_token(LatestTokenUpdate{newest, history, history_len}, question, seat_rules, answer, position_of(question, positions));
}
EXPORT(sample_pick)

KERNEL(256)
sample_verify_drafts(u8* answers, u8* newest, i32* history, const i32* ids, const i32* positions, const u8* stage, const u8* rules,
                     u32 questions, u32 history_len, i32 per_mille) {
    grid_wait();
    grid_release();
    const u32 first = bid_x() * bdim() + tid(), staged = header_of(stage)->questions;
    const u32 end = questions < staged ? questions : staged;
    if (first >= end || is_padding(stage, first)) return;
    const StageLogitsRow* asked = questions_of(stage);
    // The thread of the first logits row of a row, or of the first one in this launch, processes all of them.
    if (!needs_draft_verification(asked[first]) || (asked[first].place > 0 && first > 0)) return;
    const i32 seat = asked[first].seat;
    const SequenceSamplingParams& seat_rules = ((const SequenceSamplingParams*)rules)[seat];
    LatestToken own = ((LatestToken*)newest)[seat];
    bool counts = asked[first].place == 0 || own.stands != 0;
    for (u32 q = first; q < end && counts && (q == first || asked[q].place > 0); ++q) {
        SampledToken& answer = ((SampledToken*)answers)[q];
        const i32 position = position_of(asked[q], positions);
        const bool found = answer.status == SAMPLE_OK;
        counts = found && asked[q].draft != 0;
        if (counts) {
            const i32 draft = ids[asked[q].token + 1];
            if (per_mille < 0) counts = draft == answer.token;
            else counts = times(uniform(philox(seat_rules.key, 0, DRAW_ACCEPT, (u32)position).v[0]), 1000.f) < (float)per_mille;
            if (counts) {
                answer.token = draft;
                answer.status = SAMPLE_DRAFT_ACCEPTED;
                if ((seat_rules.flags & RULE_HISTORY) != 0 && (u32)position < history_len)
                    history[(u64)seat * history_len + position] = draft;
            }
        }
        // An error after accepted drafts leaves the previous token the newest.
        if (found || asked[q].place == 0) own = LatestToken{found ? answer.token : 0, position, 0};
        own.stands = counts ? 1 : 0;
    }
    ((LatestToken*)newest)[seat] = own;
}
EXPORT(sample_verify_drafts)
