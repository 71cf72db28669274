// mla_decode/token.h - schedule for rows with any number of tokens (EACH_TOKEN). All keys that a token
// attends to form one split. The tokens are cut into runs of as many successive tokens as a block can process
// together; the tokens of a run that belong to the same row are processed together.
//
// -DLONG_ROW=n  rows of at least n tokens are skipped: they use the non-absorbed form (mla_prefill)
#pragma once
#include "attention/row_of.h"

// Returns the first token, from `token` on, that is in a run (a fixed number of successive tokens) of this
// block, and sets `run_end` to the end of that run.
DEV u32 enter_run(const BatchMetadata& rows, u32 token, u32& run_end) {
    if (token < run_end) return token;
    const u32 run_stride = gdim_x() * rows.tokens_per_group;
    run_end += ((token - run_end) / run_stride + 1) * run_stride;
    const u32 begin = run_end - rows.tokens_per_group;
    return token > begin ? token : begin;
}

// Returns a cursor for the tokens that are processed together: those from `token` on that are in the same row
// and before `run_end`. `all`: number of tokens of all rows.
DEV SplitCursor cursor_at(const BatchMetadata& rows, u32 token, u32 run_end, u32 all) {
    SplitCursor p{};
    if (token >= all) return p;
    p.row = row_of(rows.cu_q, rows.rows, token);
#ifdef LONG_ROW
    while ((u32)(load_scalar(rows.cu_q + (p.row + 1)) - load_scalar(rows.cu_q + p.row)) >= LONG_ROW) {
        token = enter_run(rows, (u32)load_scalar(rows.cu_q + (p.row + 1)), run_end);
        if (token >= all) return p;
        p.row = row_of(rows.cu_q, rows.rows, token);
    }
#endif
    p.left = all - token;
    p.token = token;
    p.run_end = run_end;
    const u32 row_end = (u32)load_scalar(rows.cu_q + (p.row + 1)), end = row_end < run_end ? row_end : run_end;
    p.count = end - token;
    p.context = keys_seen(rows.cu_q, rows.context_lens, p.row, end - 1);
    p.table = table_of(rows, p.row);
    p.span = p.context;
    p.splits = 1;
    return p;
}

// Returns a cursor for the first tokens that this block processes. From token `first` on, tokens form runs of
// tokens_per_group successive tokens; the block processes every gdim_x()-th run.
DEV SplitCursor first_token(const BatchMetadata& rows, u32 first) {
    const u32 token = first + bid_x() * rows.tokens_per_group;
    return cursor_at(rows, token, token + rows.tokens_per_group, (u32)rows.cu_q[rows.rows]);
}

DEV void advance_cursor(SplitCursor& p, const BatchMetadata& rows) {
    if (!EACH_TOKEN) return next_split(p, rows);
    u32 run_end = p.run_end;
    const u32 token = enter_run(rows, p.token + p.count, run_end);
    p = cursor_at(rows, token, run_end, p.token + p.left);
}
