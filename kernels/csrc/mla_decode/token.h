// mla_decode/token.h - tokens of rows of any number of them, each with all keys that it sees: one split. Tokens are taken in runs of
// as many as a block has room for, of which those of one row are taken together.
//
// -DLONG_ROW=n  rows of at least n tokens are left out: keys and values are made for them (mla_prefill)
#pragma once
#include "attention/row_of.h"

// The first token from this one on that is in one of the block's runs.
DEV u32 into_run(const Rows& rows, u32 token, u32& run_end) {
    if (token < run_end) return token;
    const u32 apart = gdim_x() * rows.together;
    run_end += ((token - run_end) / apart + 1) * apart;
    const u32 begin = run_end - rows.together;
    return token > begin ? token : begin;
}

// Tokens from this one on, those of its row and in front of `run_end`. `all`: the end of all tokens.
DEV Place place_of(const Rows& rows, u32 token, u32 run_end, u32 all) {
    Place p{};
    if (token >= all) return p;
    p.row = row_of(rows.cu_q, rows.rows, token);
#ifdef LONG_ROW
    while ((u32)(rows.cu_q[p.row + 1] - rows.cu_q[p.row]) >= LONG_ROW) {
        token = into_run(rows, (u32)rows.cu_q[p.row + 1], run_end);
        if (token >= all) return p;
        p.row = row_of(rows.cu_q, rows.rows, token);
    }
#endif
    p.left = all - token;
    p.token = token;
    p.run_end = run_end;
    const u32 row_end = (u32)rows.cu_q[p.row + 1], end = row_end < run_end ? row_end : run_end;
    p.count = end - token;
    p.context = keys_seen(rows.cu_q, rows.context_lens, p.row, end - 1);
    p.table = table_of(rows, p.row);
    p.span = p.context;
    p.splits = 1;
    return p;
}

// The first of the block's tokens: it takes every so-manieth run from token `first` on.
DEV Place first_token(const Rows& rows, u32 first) {
    const u32 token = first + bid_x() * rows.together;
    return place_of(rows, token, token + rows.together, (u32)rows.cu_q[rows.rows]);
}

DEV void next_place(Place& p, const Rows& rows) {
    if (!EACH_TOKEN) return next_split(p, rows);
    u32 run_end = p.run_end;
    const u32 token = into_run(rows, p.token + p.count, run_end);
    p = place_of(rows, token, run_end, p.token + p.left);
}
