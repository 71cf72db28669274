// prepare.h - device-side access to the stage buffer of a step (step/step.h), and to the sequence slots that
// it updates.
#pragma once
#include "step/step.h"

// Arrays of per-request state, indexed by sequence slot.
struct SequenceSlots {
    LatestToken* latest;             // [slots]
    i32* tables;                     // [groups, slots, table_width]
    i32* history;                    // [slots, history_len]: token ids; history_len: maximum request length
    u32* masks;                      // [slots, mask_words]: allowed ids; mask_words = ceil(vocab / 32)
    SequenceSamplingParams* params;  // [slots]
    u32 slots, table_width, history_len, mask_words;
};

DEV const StagingHeader* header_of(const u8* stage) { return (const StagingHeader*)stage; }
DEV const StagedStepRow* rows_of(const u8* stage) { return (const StagedStepRow*)(stage + header_of(stage)->rows_at); }
DEV const StagedLogitsRow* logits_rows_of(const u8* stage) {
    return (const StagedLogitsRow*)(stage + header_of(stage)->logits_rows_at);
}
DEV const StagedSequenceInit* inits_of(const u8* stage) { return (const StagedSequenceInit*)(stage + header_of(stage)->inits_at); }
DEV const i32* words_of(const u8* stage) { return (const i32*)(stage + header_of(stage)->words_at); }
DEV const i32* facts_of(const u8* stage) { return (const i32*)(stage + header_of(stage)->facts_at); }
DEV const StagedTableChange* table_changes_of(const u8* stage) {
    return (const StagedTableChange*)(stage + header_of(stage)->table_changes_at);
}
DEV const StagedLogitEdit* edits_of(const u8* stage) { return (const StagedLogitEdit*)(stage + header_of(stage)->edits_at); }

// Copies `len` 32-bit words; all threads of the block take part.
DEV void copy_words(i32* to, const i32* from, u32 len) {
    for (u32 i = tid(); i < len; i += bdim()) to[i] = from[i];
}

DEV void init_sequence(const SequenceSlots& seq_slots, const StagedSequenceInit& init, const i32* words) {
    const u64 seq_slot = (u64)init.seq_slot;
    if (init.history_len > 0)
        copy_words(seq_slots.history + seq_slot * seq_slots.history_len + init.history_from, words + init.history_at,
                   (u32)init.history_len);
    if (init.mask_at >= 0)
        copy_words((i32*)seq_slots.masks + seq_slot * seq_slots.mask_words, words + init.mask_at, seq_slots.mask_words);
    copy_words((i32*)(seq_slots.params + seq_slot), (const i32*)&init.params, sizeof(SequenceSamplingParams) / 4);
}

// Returns the position of the first token of a row. If the host has staged the token ids, it is row.start;
// otherwise it is computed from the latest token of the sequence slot and limited to row.start, because the
// host has allocated KV blocks only for positions up to row.start.
DEV u32 start_of(const StagedStepRow& row, const LatestToken* latest) {
    if (row.ids >= 0) return (u32)row.start;
    const i32 start = latest[row.seq_slot].position - 1 - row.ids;
    return (u32)(start < row.start ? start : row.start);
}

// Returns entry `e` of a block table after its change in this step. Changed entries are read from the stage
// buffer (staged inputs of the step), because another thread block may still be writing the table.
DEV i32 table_entry(const StagedTableChange& change, const i32* table, const i32* words, i32 e) {
    const i32 within = e - change.from;
    return within >= 0 && within < change.len ? words[change.at + within] : table[e];
}

// Returns the KV slot of a position: table[position / block_tokens] * block_tokens + position mod block_tokens,
// with the table after its change in this step.
DEV i64 kv_slot_of(const StagedTableChange& change, const i32* table, const i32* words, u32 position, u32 block_tokens) {
    return (i64)table_entry(change, table, words, (i32)(position / block_tokens)) * block_tokens + position % block_tokens;
}

// Stores the new entries of a block table; all threads of the block take part.
DEV void store_table_change(const StagedTableChange& change, i32* table, const i32* words) {
    if (change.len > 0) copy_words(table + change.from, words + change.at, (u32)change.len);
}
