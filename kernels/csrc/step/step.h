// step.h - layout of the stage buffer of a step (host to device), and of the per-slot and per-logits-row
// results.
// The Rust equivalent of every record is in kernels/src/step/mod.rs; a test compares sizes and offsets.
//
// A stage is one buffer: StageHeader, then seven regions at the byte offsets that it contains, each aligned
// to 16 bytes: rows, logits rows, slot records, words (32-bit: token ids, block ids, histories, mask words),
// edits, draft rows (rows as an MTP module sees them) and row facts.
#pragma once

// Number of records of each region of a stage, and offset of each region in bytes.
struct StageHeader {
    u32 rows, logits_rows, inits, words, edits;         // numbers of records
    u32 rows_at, logits_rows_at, inits_at, words_at, edits_at;  // offsets in bytes from the start of the stage
    u32 tokens;                                         // tokens of the step = sum of StageRow.len
    u32 drafts, drafts_at;                              // number of draft rows, and their offset in bytes
    u32 facts_at, facts_per_row;                        // offset of the row facts in bytes; words per row
    u32 reserved;
};

// One row of the step: `len` tokens of the request in the sequence slot, from position `start`.
struct StageRow {
    i32 seq_slot;
    i32 start;       // position of the first token; if only the sequence slot has it, its upper bound
    i32 len;
    i32 token;       // index of the first token in the step
    i32 ids;         // words index of its token ids; -1 - n: the row begins n positions after the
                     // slot's newest token, the placeholder of all its ids until drafts are inserted
    i32 table_from;  // first entry of the block table that is replaced
    i32 table_len;   // number of entries replaced
    i32 table_at;    // words index of the new entries
};

// A row of the step as an MTP module sees it: `len` known tokens, then `drafts` draft tokens.
struct DraftRow {
    i32 seq_slot;
    i32 len;
    i32 token;           // index of the first token in the step
    i32 drafts;          // draft tokens of the module (`insert_drafts`); 0 if another proposer makes them
    i32 state_in_slot;   // 1: the sequence slot has the hidden state before the first token; 0: the state is elsewhere
    i32 boundary_block;  // block that has this state at its end; -1: elsewhere, or zeros if state_in_slot is 0
    i32 reserved[2];
};

// The newest token of the request in a sequence slot, which no row has forwarded yet.
struct LatestToken {
    i32 token;
    i32 position;
    i32 draft_accepted;  // whether the draft after it is accepted: a row may have further ones
};

// Sampling parameters of the request in a sequence slot; on the device for the lifetime of the slot's
// assignment.
struct SequenceSamplingParams {
    float temperature;  // below 1e-5: greedy
    float top_p, min_p;
    i32 top_k;          // 0 = all
    float repetition, frequency, presence;
    u32 flags;          // RULE_*
    u64 key;            // key of the request's noise
    i32 prompt_len;     // positions from here on are output
    i32 reserved;
};
enum : u32 {
    RULE_MASKED = 1,   // ids with a clear mask bit are excluded
    RULE_HISTORY = 2,  // a rule reads earlier ids: sampled ones are appended to the history
};

// A request that starts in a sequence slot: its sampling parameters and, if a rule reads them, its known ids
// and its mask.
struct StageSequenceInit {
    i32 seq_slot;
    i32 history_at, history_from, history_len;  // words index; first position; number of ids
    i32 mask_at;                                // words index of ceil(V / 32) words, -1: none
    i32 reserved[3];
    SequenceSamplingParams params;
};

// Request for a result from the logits of one token of the step.
struct StageLogitsRow {
    i32 token;        // token of the step; the result is for the next position; -1: padding
    i32 seq_slot;
    i32 draft_index;  // number of draft tokens before it in its row: all must be accepted
    i32 has_draft;    // 1: the step's next token is a draft of the result; 0: there is no draft
    i32 known_token;  // the token, if only its log-probability is requested; -1: sample one
    i32 top;          // number of top ids to report; -1: no log-probabilities
    i32 edits_at;     // first record of the edits region
    i32 edits;        // number of records
};

// Changes one logit: `value` is added (-inf masks). With when_len > 0 only if the ids before the position end
// with the `when_len` words at `when_at`; with when_len < 0 only at positions below `when_at`.
struct StageLogitEdit {
    u32 id;
    float value;
    i32 when_at, when_len;
};

// Result of one logits row.
struct SampledToken {
    i32 token;
    u32 status;     // SAMPLE_*
    float logprob;  // of the token, under the raw logits; if requested
    u32 rank;       // rank of the token among all ids, from 1
};
// SAMPLE_DRAFT_ACCEPTED: as OK, and the draft of this token is accepted, by equality or at random.
enum : u32 { SAMPLE_OK = 0, SAMPLE_NON_FINITE = 1, SAMPLE_ALL_MASKED = 2, SAMPLE_DRAFT_ACCEPTED = 3 };
