// logits_row.h - what is asked about a row, and where the answer goes.
#pragma once
#include "prepare/prepare.h"

// The rules of a question's seat. Where nothing is chosen, no seat is named, and nobody looks at the rules.
DEV const SequenceSamplingParams& rules_of(const StageLogitsRow& question, const u8* rules) {
    return ((const SequenceSamplingParams*)rules)[question.known < 0 ? question.seat : 0];
}
DEV bool is_padding(const u8* stage, u32 q) {
    return q >= header_of(stage)->questions || questions_of(stage)[q].token < 0;
}

// Position of the token asked for; positions i32 [T] are those of the step's tokens.
DEV i32 position_of(const StageLogitsRow& question, const i32* positions) { return positions[question.token] + 1; }
// Whether the token may be the newest one only if drafts stand, or has one behind it.
DEV bool needs_draft_verification(const StageLogitsRow& question) { return question.known < 0 && (question.place > 0 || question.draft != 0); }

// What is kept of tokens that were chosen.
struct LatestTokenUpdate {
    u8* newest;    // LatestToken [S]
    i32* history;  // [S, history_len]
    u32 history_len;
};

// A token that was chosen becomes the newest one of its seat, where no drafts have to do with it, and joins the seat's history
// where a rule reads it. One thread comes.
DEV void update_latest_token(const LatestTokenUpdate& seats, const StageLogitsRow& question, const SequenceSamplingParams& rules, const SampledToken& answer,
                             i32 position) {
    const bool found = answer.status == SAMPLE_OK;
    if (!needs_draft_verification(question)) ((LatestToken*)seats.newest)[question.seat] = LatestToken{found ? answer.token : 0, position, 0};
    if (found && (rules.flags & RULE_HISTORY) != 0 && (u32)position < seats.history_len)
        seats.history[(u64)question.seat * seats.history_len + position] = answer.token;
}
