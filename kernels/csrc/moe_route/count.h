// moe_route/count.h - token counts per expert, updated by the routing kernels.
#pragma once

// Returns `counts`, the token counters of the experts of a layer, or null if the token must not be counted: a
// token without a KV slot (slot < 0) is padding. If `slots` is null, every token is counted.
DEV u32* counters_of(u32* counts, const i64* slots, u64 token) {
    return counts && (!slots || slots[token] >= 0) ? counts : nullptr;
}
