// prepare.h - device-side access to the stage buffer (step.h), and to the sequence slots that it updates.
#pragma once
#include "step/step.h"

// Per-request state in sequence slots. S slots, W table width, L maximum request length, V vocabulary size.
struct SequenceSlots {
    LatestToken* latest;             // [S]
    i32* tables;                     // [S, W]
    i32* history;                    // [S, L]
    u32* masks;                      // [S, ceil(V / 32)]
    SequenceSamplingParams* params;  // [S]
    u32 table_width, history_len, mask_words;
};

DEV const StageHeader* header_of(const u8* stage) { return (const StageHeader*)stage; }
DEV const StageRow* rows_of(const u8* stage) { return (const StageRow*)(stage + header_of(stage)->rows_at); }
DEV const StageLogitsRow* logits_rows_of(const u8* stage) {
    return (const StageLogitsRow*)(stage + header_of(stage)->logits_rows_at);
}
DEV const StageSequenceInit* inits_of(const u8* stage) { return (const StageSequenceInit*)(stage + header_of(stage)->inits_at); }
DEV const i32* words_of(const u8* stage) { return (const i32*)(stage + header_of(stage)->words_at); }
DEV const i32* facts_of(const u8* stage) { return (const i32*)(stage + header_of(stage)->facts_at); }
DEV const StageEdit* edits_of(const u8* stage) { return (const StageEdit*)(stage + header_of(stage)->edits_at); }

// Copies `len` words with the whole block.
DEV void copy_words(i32* to, const i32* from, u32 len) {
    for (u32 i = tid(); i < len; i += bdim()) to[i] = from[i];
}

DEV void init_sequence(const SequenceSlots& seq_slots, const StageSequenceInit& init, const i32* words) {
    const u64 seq_slot = (u64)init.seq_slot;
    if (init.history_len > 0)
        copy_words(seq_slots.history + seq_slot * seq_slots.history_len + init.history_from, words + init.history_at,
                   (u32)init.history_len);
    if (init.mask_at >= 0)
        copy_words((i32*)seq_slots.masks + seq_slot * seq_slots.mask_words, words + init.mask_at, seq_slots.mask_words);
    copy_words((i32*)(seq_slots.params + seq_slot), (const i32*)&init.params, sizeof(SequenceSamplingParams) / 4);
}

// Position of the first token of a row: from the host, or from the sequence slot, bounded by what the host
// has allocated blocks for.
DEV u32 start_of(const StageRow& row, const LatestToken* latest) {
    if (row.ids >= 0) return (u32)row.start;
    const i32 start = latest[row.seq_slot].position - 1 - row.ids;
    return (u32)(start < row.start ? start : row.start);
}

// Entry `e` of the row's block table after the update, read from the stage buffer because another block may
// be writing the table.
DEV i32 table_entry(const StageRow& row, const i32* table, const i32* words, i32 e) {
    const i32 within = e - row.table_from;
    return within >= 0 && within < row.table_len ? words[row.table_at + within] : table[e];
}
