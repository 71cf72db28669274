// step.h - what the host stages for one step, and what a step leaves behind per seat and per question.
// The Rust twin of every record is in kernels/src/step/mod.rs; a test compares sizes and offsets.
//
// A stage is one buffer: StageHeader, then six regions at the byte offsets it names, each aligned to 16:
// rows, questions, seat records, words (32-bit: token ids, block ids, histories, mask words), edits and rows as draft layers
// see them.
#pragma once

// Where the regions of a stage begin, in bytes, and how many records they hold.
struct StageHeader {
    u32 rows, questions, inits, words, edits;           // records
    u32 rows_at, questions_at, inits_at, words_at, edits_at;  // bytes from the start of the stage
    u32 tokens;                                         // tokens of the step = sum of Row.len
    u32 drafts, drafts_at;                              // as above
    u32 facts_at, facts_per_row;                        // words of facts about each row, row by row
    u32 reserved;
};

// One row of the step: `len` tokens of the request on `seat`, from position `start`.
struct StageRow {
    i32 seat;
    i32 start;       // position of the first token; where the seat knows it, the furthest that it may be
    i32 len;
    i32 token;       // index of the first token in the step
    i32 ids;         // words index of its token ids; -1 - n: the row begins n positions behind the newest token of the seat, whose
                     // id stands for all of its ids until drafts are entered
    i32 table_from;  // first entry of the block table that is replaced
    i32 table_len;   // entries replaced
    i32 table_at;    // words index of the new entries
};

// A row of the step as a draft layer sees it: `len` known tokens, then `drafts` drafts.
struct DraftRow {
    i32 seat;
    i32 len;
    i32 token;   // index of the first token in the step
    i32 drafts;  // the layer's own, which `insert_drafts` enters behind the known tokens; 0 where others make them
    i32 held;    // 1: the seat holds the state before the first token; 0: it lies elsewhere
    i32 edge;    // it is the one at the end of this block; -1: elsewhere, and with held 0: zeros
    i32 reserved[2];
};

// The newest token of the request on a seat, which no row has forwarded yet.
struct LatestToken {
    i32 token;
    i32 position;
    i32 stands;  // whether the draft behind it is right: a row may have more of them
};

// How the tokens of the request on a seat are chosen; held on the device for the life of the seat.
struct SequenceSamplingParams {
    float temperature;  // below 1e-5: the likeliest id
    float top_p, min_p;
    i32 top_k;          // 0 = all
    float repetition, frequency, presence;
    u32 flags;          // RULE_*
    u64 key;            // of the request's noise
    i32 prompt_len;     // positions from here on are output
    i32 reserved;
};
enum : u32 {
    RULE_MASKED = 1,   // ids whose mask bit is clear are out
    RULE_HISTORY = 2,  // a rule reads earlier ids: sampled ones are appended to the history
};

// A request that takes a seat: its sampling rules and, where a rule reads them, its known ids and its mask.
struct StageSequenceInit {
    i32 seat;
    i32 history_at, history_from, history_len;  // words index; first position; ids
    i32 mask_at;                                // words index of ceil(V / 32) words, -1: none
    i32 reserved[3];
    SequenceSamplingParams rules;
};

// What is asked about the logits behind one token of the step.
struct StageLogitsRow {
    i32 token;     // token of the step, behind which the one asked for comes; -1: padding, nothing is asked
    i32 seat;
    i32 place;     // drafts in front of it in its row: all must be right
    i32 draft;     // 1: the step's next token is a draft of what is asked for; 0: nothing is guessed
    i32 known;     // the token, where only its log-probability is asked for; -1: choose one
    i32 top;       // ids to report beside the token; -1: no log-probabilities at all
    i32 edits_at;  // first record of the edits region
    i32 edits;     // records
};

// Changes one logit: `value` is added (-inf masks). With when_len > 0 only if the ids before the position
// end with the `when_len` words at `when_at`, with when_len < 0 only at positions below `when_at`.
struct StageEdit {
    u32 id;
    float value;
    i32 when_at, when_len;
};

// The answer to one question.
struct SampledToken {
    i32 token;
    u32 status;     // SAMPLE_*
    float logprob;  // of the token, under the raw logits; if asked for
    u32 rank;       // its place among all ids, from 1
};
// SAMPLE_DRAFT_ACCEPTED: as OK, and the draft of this token is right, or chance lets it stand.
enum : u32 { SAMPLE_OK = 0, SAMPLE_NON_FINITE = 1, SAMPLE_ALL_MASKED = 2, SAMPLE_DRAFT_ACCEPTED = 3 };
