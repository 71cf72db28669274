// logits_row.h - access to the request of a logits row (StagedLogitsRow), and update of its sequence slot with
// the chosen token.
#pragma once
#include "prepare/prepare.h"

// Returns the sampling parameters of the request to which a logits row belongs. If the row only scores a
// known token, its seq_slot is not set; the returned parameters are then arbitrary and not used.
DEV const SequenceSamplingParams& params_of(const StagedLogitsRow& logits_row, const u8* slot_params) {
    return ((const SequenceSamplingParams*)slot_params)[logits_row.known_token < 0 ? logits_row.seq_slot : 0];
}
DEV bool is_padding(const u8* stage, u32 q) {
    return q >= header_of(stage)->logits_rows || logits_rows_of(stage)[q].token < 0;
}

// Returns the position of the token to be sampled: the position after that of the token whose logits are
// sampled. `positions`: positions of the tokens of the step, i32 [tokens].
DEV i32 position_of(const StagedLogitsRow& logits_row, const i32* positions) { return positions[logits_row.token] + 1; }
// Whether sample_verify_drafts determines if the sampled token is used: there are draft tokens before its
// position, or a draft token at its position.
DEV bool needs_draft_verification(const StagedLogitsRow& logits_row) { return logits_row.known_token < 0 && (logits_row.draft_index > 0 || logits_row.has_draft != 0); }

// Per-slot arrays that update_latest_token() writes.
struct LatestTokenArrays {
    u8* latest;    // LatestToken [slots]
    i32* history;  // [slots, history_len]
    u32 history_len;
};

// Stores a sampled token as the newest token of its sequence slot, unless sample_verify_drafts will do so.
// Appends it to the token history of the slot if a sampling rule reads the history. Called by one thread.
DEV void update_latest_token(const LatestTokenArrays& slots, const StagedLogitsRow& logits_row, const SequenceSamplingParams& params, const SampledToken& output,
                             i32 position) {
    const bool sampled = output.status == SAMPLE_OK;
    if (!needs_draft_verification(logits_row)) ((LatestToken*)slots.latest)[logits_row.seq_slot] = LatestToken{sampled ? output.token : 0, position, 0};
    if (sampled && (params.flags & RULE_HISTORY) != 0 && (u32)position < slots.history_len)
        slots.history[(u64)logits_row.seq_slot * slots.history_len + position] = output.token;
}
