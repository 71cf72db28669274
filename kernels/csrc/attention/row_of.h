// attention/row_of.h - the row (request) of a token in a packed batch, and the keys that the token attends
// to.
#pragma once
#include "dev/scalar.h"

// Returns the row whose token range [cu_q[row], cu_q[row + 1]) contains `token`.
DEV u32 row_of(const i32* cu_q, u32 rows, u32 token) {
    u32 low = 0, high = rows;
    while (high - low > 1) {
        const u32 mid = (low + high) / 2;
        if ((u32)load_scalar(cu_q + mid) <= token) low = mid;
        else high = mid;
    }
    return low;
}

// Returns the number of keys that `token` of `row` attends to, the key of `token` included.
DEV u32 keys_seen(const i32* cu_q, const i32* context_lens, u32 row, u32 token) {
    const i32 context = load_scalar(context_lens + row), later_tokens = load_scalar(cu_q + (row + 1)) - 1 - (i32)token;
    return context > later_tokens ? (u32)(context - later_tokens) : 0;
}
