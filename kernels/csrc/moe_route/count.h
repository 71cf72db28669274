// moe_route/count.h - tokens by expert, counted where they are chosen.
#pragma once

// Where a token's choices are counted: in a layer's counters by expert, or nowhere (null). A token without a slot is padding;
// without slots none is.
DEV u32* counters_of(u32* counts, const i64* slots, u64 token) {
    return counts && (!slots || slots[token] >= 0) ? counts : nullptr;
}
