// mla_prefill/long_rows.h - rows of so many tokens that keys and values are made for them, and where these lie: the keys of all such
// rows one behind another, each row's filled up to whole steps. A launch has a window of that list. No result depends on where windows
// are cut: keys of a row are taken in steps that begin at fixed positions, and what a step leaves is carried on as it is.
#pragma once

enum : u32 { STEP_KEYS = 128 };  // The twin of the same in kernels/src/gpu/mla_prefill_plan.rs.

// Rows [first, first + count) of a step, of which those of at least so many tokens are meant.
struct LongRows {
    const i32 *cu_q, *context_lens;
    u32 first, count, least;
};
struct Window { u32 begin, keys; };  // both in whole steps

// Of row i of those; nothing if it is not meant, or not there.
struct Lengths { u32 tokens, context; };
DEV Lengths lengths_of(const LongRows& rows, u32 i) {
    if (i >= rows.count) return Lengths{0, 0};
    const i32* cu_q = rows.cu_q + rows.first + i;
    const u32 tokens = (u32)(cu_q[1] - cu_q[0]);
    return tokens < rows.least ? Lengths{0, 0} : Lengths{tokens, (u32)rows.context_lens[rows.first + i]};
}
// Keys in the list; a padded row has none.
DEV u32 span_of(const Lengths& row) {
    return row.context < row.tokens ? 0 : (row.context + STEP_KEYS - 1) / STEP_KEYS * STEP_KEYS;
}

// Steps [step, end) of a tile's `steps` are in the window, the first of them from row `at` of the window on; none if step >= end.
struct Cut { u32 step, end, steps, at; };
// Of a tile whose last token sees `keys` of a row that begins at `begin` in the list.
DEV Cut cut_of(u32 keys, u32 begin, const Window& window) {
    const u32 behind = window.begin + window.keys;
    Cut cut{};
    cut.steps = (keys + STEP_KEYS - 1) / STEP_KEYS;
    cut.step = window.begin > begin ? (window.begin - begin) / STEP_KEYS : 0;
    const u32 end = behind > begin ? (behind - begin) / STEP_KEYS : 0;
    cut.end = end < cut.steps ? end : cut.steps;
    cut.at = begin + cut.step * STEP_KEYS - window.begin;
    return cut;
}
