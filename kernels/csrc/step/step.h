// step.h - layout of the stage buffer, which the host copies to the device for each step, and of the device's
// records per sequence slot and per logits row.
// The Rust equivalent of every record is in kernels/src/step/mod.rs; a test compares sizes and offsets.
//
// A stage buffer begins with a StagingHeader, which has the byte offsets of eight regions, each aligned to 16
// bytes: rows, logits rows, sequence inits, words (32 bits each: token ids, block ids, histories, bitmask
// words), edits, draft rows (rows as inputs of an MTP module), row facts (further words per row) and table
// changes (of the KV groups from 1 on; a model with one KV group has none).
#pragma once

// Header of a stage buffer (the staged inputs of a step): number of records and byte offset of each region.
struct StagingHeader {
    u32 rows, logits_rows, inits, words, edits;         // numbers of records
    u32 rows_at, logits_rows_at, inits_at, words_at, edits_at;  // offsets in bytes from the start of the stage
    u32 tokens;                                         // number of tokens of the step: sum of StagedStepRow.len
    u32 drafts, drafts_at;                              // number of draft rows, and their offset in bytes
    u32 facts_at, facts_per_row;                        // offset of the row facts; words per row
    u32 table_changes_at;                               // offset of the table changes: groups - 1 per row
};

// One row of the step: `len` tokens of the request in the sequence slot, from position `start`.
struct StagedStepRow {
    i32 seq_slot;
    i32 start;       // position of the first token; if only the sequence slot has it, its upper bound
    i32 len;
    i32 token;       // index of the row's first token in the step
    i32 ids;         // index in the words region of its token ids; or -1 - n: row begins n positions after
                     // the newest token of the slot; all ids of the row are the id of that token until
                     // insert_drafts replaces them
    i32 table_from;  // first entry of the block table of KV group 0 that is replaced
    i32 table_len;   // number of entries that are replaced
    i32 table_at;    // index in the words region of the new entries
};

// Change of the block table of one KV group from 1 on by a row of the step. Row r has those of groups 1, 2, .. at
// indices r * (groups - 1), r * (groups - 1) + 1, ..
struct StagedTableChange {
    i32 from;  // first entry that is replaced
    i32 len;   // number of entries that are replaced
    i32 at;    // index in the words region of the new entries
};

// A row of the step as input of a draft model (MTP module): `len` known tokens, after which the draft model
// proposes `drafts` draft tokens.
struct StagedDraftRow {
    i32 seq_slot;
    i32 len;
    i32 token;           // index of the first token in the step
    i32 drafts;          // number of draft tokens that the module proposes; 0 with another proposer
    i32 state_in_slot;   // 1: the sequence slot has the hidden state of the position before the first token
    i32 boundary_block;  // block whose last position has that state; -1: none. Neither: zeros
    i32 reserved[2];
};

// The newest token of the request in a sequence slot. It has been sampled, but no forward pass has processed
// it yet.
struct LatestToken {
    i32 token;
    i32 position;
    i32 draft_accepted;  // whether the draft token after it was accepted
};

// Sampling parameters of the request in a sequence slot; kept on the device while the request has the slot.
struct SequenceSamplingParams {
    float temperature;  // below 1e-5: greedy
    float top_p, min_p;
    i32 top_k;          // 0 = all
    float repetition, frequency, presence;
    u32 flags;          // RULE_*
    u64 key;            // Philox key of the request's noise
    i32 prompt_len;     // number of prompt tokens; later positions are output
    i32 reserved;
};
enum : u32 {
    RULE_MASKED = 1,   // ids with a clear bit in the slot's bitmask are excluded
    RULE_HISTORY = 2,  // penalties or edits read earlier ids, so sampled ids are appended to the history
};

// Initial state of a request that starts in a sequence slot: its sampling parameters and, if these need them,
// its known ids and the bitmask of its allowed ids.
struct StagedSequenceInit {
    i32 seq_slot;
    i32 history_at, history_from, history_len;  // index in the words region; first position; number of ids
    i32 mask_at;                                // index in the words region; -1: no bitmask
    i32 reserved[3];
    SequenceSamplingParams params;
};

// Request to sample a token, or to score a known token, from the logits of one token of the step.
struct StagedLogitsRow {
    i32 token;        // index of a token of the step, whose logits are sampled; -1: padding
    i32 seq_slot;
    i32 draft_index;  // number of draft tokens before it in its row, which must all be accepted
    i32 has_draft;    // 1: the next token of the step is the draft token that the result verifies
    i32 known_token;  // token of which only the log-probability is requested; -1: sample a token
    i32 top;          // number of top ids to report; -1: no log-probabilities
    i32 edits_at;     // index of its first record in the edits region
    i32 edits;        // number of its edits
    i32 mask_at;      // index in the words region of its grammar bitmask, which replaces that of the slot
    i32 mask_words;   // number of words of that bitmask; 0: none
};

// Change of one logit before sampling: `value` is added to it (minus infinity bans the id). With when_len > 0
// the change applies only if the preceding token ids end with the `when_len` ids at index `when_at` of the
// words region; with when_len < 0 it applies only at positions below `when_at`; with when_len = 0 always.
struct StagedLogitEdit {
    u32 id;
    float value;
    i32 when_at, when_len;
};

// Result of sampling one logits row.
struct SampledToken {
    i32 token;
    u32 status;     // SAMPLE_*
    float logprob;  // log-probability of the token under the raw logits, if requested
    u32 rank;       // rank of the token among all ids, from 1
};
// Status of a sampled token. SAMPLE_DRAFT_ACCEPTED: a token was sampled, and the draft token at its position
// is accepted, because both are equal or at random (synthetic acceptance).
enum : u32 { SAMPLE_OK = 0, SAMPLE_NON_FINITE = 1, SAMPLE_ALL_MASKED = 2, SAMPLE_DRAFT_ACCEPTED = 3 };
