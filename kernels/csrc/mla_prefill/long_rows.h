// mla_prefill/long_rows.h - long rows use non-absorbed MLA, for which keys and values are computed from
// compressed KV. The keys of all long rows form one list, row after row, each row padded to whole steps. A
// launch processes a contiguous chunk of that list (its window). Results do not depend on the window
// boundaries: keys of a row are processed in steps at fixed positions, and the state after a step is carried
// over unchanged.
#pragma once

enum : u32 { STEP_KEYS = 128 };  // Must equal the constant in kernels/src/gpu/mla_prefill_plan.rs.

// Describes the long rows of a step: those of rows [first, first + count) that have at least `least` tokens.
struct LongRows {
    const i32 *cu_q, *context_lens;
    u32 first, count, least;
};
// Chunk (window) of the list of keys that a launch processes: entries [begin, begin + keys) of the list;
// `begin` and `keys` are multiples of STEP_KEYS.
struct KeyListChunk { u32 begin, keys; };

// Number of tokens and context length of a row; both are zero if row i is not a long row or is out of range.
struct RowLengths { u32 tokens, context; };
DEV RowLengths lengths_of(const LongRows& rows, u32 i) {
    if (i >= rows.count) return RowLengths{0, 0};
    const i32* cu_q = rows.cu_q + rows.first + i;
    const u32 tokens = (u32)(cu_q[1] - cu_q[0]);
    return tokens < rows.least ? RowLengths{0, 0} : RowLengths{tokens, (u32)rows.context_lens[rows.first + i]};
}
// Returns the number of entries of a row in the list of keys: its context length, rounded up to a multiple of
// STEP_KEYS; 0 for a padding row.
DEV u32 span_of(const RowLengths& row) {
    return row.context < row.tokens ? 0 : (row.context + STEP_KEYS - 1) / STEP_KEYS * STEP_KEYS;
}

// The steps (STEP_KEYS keys each) of a tile whose keys are in the window of this launch: steps [step, end) of
// all `steps` steps; empty if step >= end. The first of them begins at key `at` of the window.
struct StepRange { u32 step, end, steps, at; };
// Returns the steps of a tile whose keys are in the window. `keys`: number of keys that the last token of the
// tile attends to. `begin`: index in the list of keys of the first key of the row.
DEV StepRange steps_in_window(u32 keys, u32 begin, const KeyListChunk& window) {
    const u32 window_end = window.begin + window.keys;
    StepRange range{};
    range.steps = (keys + STEP_KEYS - 1) / STEP_KEYS;
    range.step = window.begin > begin ? (window.begin - begin) / STEP_KEYS : 0;
    const u32 end = window_end > begin ? (window_end - begin) / STEP_KEYS : 0;
    range.end = end < range.steps ? end : range.steps;
    range.at = begin + range.step * STEP_KEYS - window.begin;
    return range;
}
