// logits_row.h - request for a token of one logits row, and storage of its result.
#pragma once
#include "prepare/prepare.h"

// Sampling parameters of the logits row's sequence slot. If no token is chosen, the slot is unset, and the
// parameters are unused.
DEV const SequenceSamplingParams& rules_of(const StageLogitsRow& question, const u8* rules) {
    return ((const SequenceSamplingParams*)rules)[question.known < 0 ? question.seat : 0];
}
DEV bool is_padding(const u8* stage, u32 q) {
    return q >= header_of(stage)->questions || questions_of(stage)[q].token < 0;
}

// Position of the token to be sampled; positions i32 [T] are those of the step's tokens.
DEV i32 position_of(const StageLogitsRow& question, const i32* positions) { return positions[question.token] + 1; }
// Whether the token is the newest one only if drafts before it are accepted, or a draft of it follows.
DEV bool needs_draft_verification(const StageLogitsRow& question) { return question.known < 0 && (question.place > 0 || question.draft != 0); }

// Slot state that a chosen token updates.
struct LatestTokenUpdate {
    u8* newest;    // LatestToken [S]
    i32* history;  // [S, history_len]
    u32 history_len;
};

// Makes a chosen token the newest one of its sequence slot, unless draft verification decides that later, and
// appends it to the slot's history if a sampling rule reads it. Called by one thread.
DEV void update_latest_token(const LatestTokenUpdate& seats, const StageLogitsRow& question, const SequenceSamplingParams& rules, const SampledToken& answer,
                             i32 position) {
    const bool found = answer.status == SAMPLE_OK;
    if (!needs_draft_verification(question)) ((LatestToken*)seats.newest)[question.seat] = LatestToken{found ? answer.token : 0, position, 0};
    if (found && (rules.flags & RULE_HISTORY) != 0 && (u32)position < seats.history_len)
        seats.history[(u64)question.seat * seats.history_len + position] = answer.token;
}
