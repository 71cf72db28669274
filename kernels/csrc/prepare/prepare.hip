// prepare.hip - converts the stage buffer of a step into the inputs of a forward pass. CPU reference:
// cpu/step.rs (`StepPreparation`).
//
// prepare_step  writes to sequence slots: sampling parameters, history and mask of requests that start in a
//               slot; block tables of the rows, i32 [groups, sequence slots, table_width]
//               writes forward inputs: ids, positions i32 [tokens], slots i64 [groups, slots_stride]; cu_q i32
//               [rows + 1]; context_lens i32 [rows]; row_facts i32 [facts, rows]; logits_indices i32 [logits_rows]
// Grid: (rows, at least 1; blocks per row). Block: 256. In a captured graph the arguments rows, tokens and
// logits_rows are those of the graph's batch size, and the header has the real numbers. The rest is padding:
// rows without keys, tokens with id 0, position 0 and slot -1, logits index 0. Each KV group has a block table per
// sequence slot, and each token a KV slot per group. If several thread blocks process one row, all of them read
// the new block table entries of the row from the stage buffer, so that they need not wait for the thread block
// that stores the entries. The host has checked the indices of the stage buffer (slots, table entries, words).
// Roofline: bound by the latency of three dependent loads.
#include "dev.h"
#include "prepare/prepare.h"

// Forward inputs that prepare_step writes.
struct PreparedStepInputs {
    i32 *ids, *positions;
    i64* slots;  // [groups, slots_stride]
    i32 *cu_q, *context_lens, *logits_indices, *row_facts;
    u32 slots_stride;
};

// Returns the block table of KV group `group` of a sequence slot.
DEV i32* table_of(const SequenceSlots& seq_slots, u32 group, i32 seq_slot) {
    return seq_slots.tables + ((u64)group * seq_slots.slots + (u64)seq_slot) * seq_slots.table_width;
}

// Returns the change of the block table of KV group 0 by a row.
DEV StagedTableChange first_change_of(const StagedStepRow& row) { return {row.table_from, row.table_len, row.table_at}; }

// Writes the token ids, positions and KV slots in group 0 of the tokens of a row with indices from, from + step,
// from + 2 step, ..
DEV void write_row_inputs(const PreparedStepInputs& out, const SequenceSlots& seq_slots, const StagedStepRow& row,
                          const i32* words, u32 block_tokens, u32 from, u32 step) {
    const StagedTableChange change = first_change_of(row);
    const i32* table = table_of(seq_slots, 0, row.seq_slot);
    const u32 start = start_of(row, seq_slots.latest);
    for (u32 i = from; i < (u32)row.len; i += step) {
        const u32 t = (u32)row.token + i, position = start + i;
        const i64 slot = kv_slot_of(change, table, words, position, block_tokens);  // Loaded together with the id.
        out.ids[t] = row.ids < 0 ? seq_slots.latest[row.seq_slot].token : words[row.ids + (i32)i];
        out.positions[t] = (i32)position;
        out.slots[t] = slot;
    }
}

// Writes the KV slots in group `group` of the tokens of a row with indices from, from + step, from + 2 step, ..
DEV void write_group_slots(const PreparedStepInputs& out, const SequenceSlots& seq_slots, const StagedStepRow& row,
                           const StagedTableChange& change, u32 group, const i32* words, u32 block_tokens, u32 from,
                           u32 step) {
    const i32* table = table_of(seq_slots, group, row.seq_slot);
    const u32 start = start_of(row, seq_slots.latest);
    i64* slots = out.slots + (u64)group * out.slots_stride + (u32)row.token;
    for (u32 i = from; i < (u32)row.len; i += step) slots[i] = kv_slot_of(change, table, words, start + i, block_tokens);
}

DEV void pad_tokens(const PreparedStepInputs& out, u32 groups, u32 from, u32 to, u32 step) {
    for (u32 t = from; t < to; t += step) {
        out.ids[t] = 0;
        out.positions[t] = 0;
        for (u32 g = 0; g < groups; g++) out.slots[(u64)g * out.slots_stride + t] = -1;
    }
}

KERNEL(256)
prepare_step(i32* ids, i32* positions, i64* slots, i32* cu_q, i32* context_lens, i32* logits_indices, i32* row_facts,
             i32* tables, i32* history, u32* masks, u8* params, const u8* latest, const u8* stage, u32 rows, u32 tokens,
             u32 logits_rows, u32 table_width, u32 history_len, u32 mask_words, u32 block_tokens, u32 facts_stride, u32 groups,
             u32 seq_slot_count, u32 slots_stride) {
    grid_wait();
    grid_launch_dependents();
    const PreparedStepInputs out = {ids, positions, slots, cu_q, context_lens, logits_indices, row_facts, slots_stride};
    const SequenceSlots seq_slots = {(LatestToken*)latest, tables,      history,     masks,     (SequenceSamplingParams*)params,
                                     seq_slot_count,       table_width, history_len, mask_words};
    const StagingHeader header = *header_of(stage);
    const i32* words = words_of(stage);
    const u32 r = bid_x(), part = bid_y(), parts = gdim_y();
    const u32 blocks = gdim_x() * parts, block = r * parts + part;
    const u32 thread = block * bdim() + tid(), threads = blocks * bdim();

    for (u32 i = block; i < header.inits; i += blocks) init_sequence(seq_slots, inits_of(stage)[i], words);
    u32 end = 0;
    if (header.rows > 0) {
        const StagedStepRow& last_row = rows_of(stage)[header.rows - 1];
        end = (u32)(last_row.token + last_row.len);
    }
    if (r < header.rows && r < rows) {
        const StagedStepRow row = rows_of(stage)[r];
        const u32 from = part * bdim() + tid(), step = parts * bdim();
        write_row_inputs(out, seq_slots, row, words, block_tokens, from, step);
        for (u32 g = 1; g < groups; g++) {
            const StagedTableChange change = table_changes_of(stage)[r * (groups - 1) + g - 1];
            write_group_slots(out, seq_slots, row, change, g, words, block_tokens, from, step);
            if (part == 0) store_table_change(change, table_of(seq_slots, g, row.seq_slot), words);
        }
        if (part == 0) {
            store_table_change(first_change_of(row), table_of(seq_slots, 0, row.seq_slot), words);
            if (tid() == 0) {
                context_lens[r] = (i32)start_of(row, seq_slots.latest) + row.len;
                cu_q[r + 1] = row.token + row.len;
            }
        }
    } else if (r < rows && part == 0 && tid() == 0) {
        context_lens[r] = 0;
        cu_q[r + 1] = (i32)end;
    }
    if (r < rows && part == 0) {
        const i32* facts = facts_of(stage) + (u64)r * header.facts_per_row;
        for (u32 f = tid(); f < header.facts_per_row; f += bdim())
            row_facts[(u64)f * facts_stride + r] = r < header.rows ? facts[f] : 0;
    }
    if (thread == 0) cu_q[0] = 0;
    pad_tokens(out, groups, end + thread, tokens, threads);
    for (u32 q = thread; q < logits_rows; q += threads) {
        const i32 token = q < header.logits_rows ? logits_rows_of(stage)[q].token : 0;
        logits_indices[q] = token > 0 ? token : 0;
    }
}
EXPORT(prepare_step)
