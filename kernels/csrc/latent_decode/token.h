// latent_decode/token.h - tokens of rows of any number of them, each with all keys that it sees: one split.
#pragma once
#include "attention/row_of.h"

// `left`: tokens from this one to the last of the block.
DEV Place place_of(const Rows& rows, u32 token, u32 left) {
    Place p{};
    p.token = token;
    p.row = row_of(rows.cu_q, rows.rows, token);
    p.context = keys_seen(rows.cu_q, rows.context_lens, p.row, token);
    p.table = table_of(rows, p.row);
    p.span = p.context;
    p.splits = 1;
    p.left = left;
    return p;
}
