// logits_row.h - access to the request of a logits row (StagedLogitsRow), and update of its sequence slot with
// the chosen token.
#pragma once
#include "prepare/prepare.h"

// Returns the sampling parameters of the logits row's sequence slot. If no token is to be chosen, seq_slot is
// not set, and the parameters are not used.
DEV const SequenceSamplingParams& params_of(const StagedLogitsRow& logits_row, const u8* slot_params) {
    return ((const SequenceSamplingParams*)slot_params)[logits_row.known_token < 0 ? logits_row.seq_slot : 0];
}
DEV bool is_padding(const u8* stage, u32 q) {
    return q >= header_of(stage)->logits_rows || logits_rows_of(stage)[q].token < 0;
}

// Returns the position of the token to be sampled; positions i32 [tokens] are those of the step's tokens.
DEV i32 position_of(const StagedLogitsRow& logits_row, const i32* positions) { return positions[logits_row.token] + 1; }
// Whether draft verification decides about the sampled token: it has draft tokens before it, or a draft token
// for the same position.
DEV bool needs_draft_verification(const StagedLogitsRow& logits_row) { return logits_row.known_token < 0 && (logits_row.draft_index > 0 || logits_row.has_draft != 0); }

// Per-slot arrays that update_latest_token() writes.
struct LatestTokenArrays {
    u8* latest;    // LatestToken [slots]
    i32* history;  // [slots, history_len]
    u32 history_len;
};

// Makes a chosen token the newest one of its sequence slot, unless draft verification decides that later, and
// appends it to the slot's history if a sampling rule reads it. Called by one thread.
DEV void update_latest_token(const LatestTokenArrays& slots, const StagedLogitsRow& logits_row, const SequenceSamplingParams& params, const SampledToken& output,
                             i32 position) {
    const bool sampled = output.status == SAMPLE_OK;
    if (!needs_draft_verification(logits_row)) ((LatestToken*)slots.latest)[logits_row.seq_slot] = LatestToken{sampled ? output.token : 0, position, 0};
    if (sampled && (params.flags & RULE_HISTORY) != 0 && (u32)position < slots.history_len)
        slots.history[(u64)logits_row.seq_slot * slots.history_len + position] = output.token;
}
