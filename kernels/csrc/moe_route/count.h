// moe_route/count.h - token counts per expert, updated by the routing kernels.
#pragma once

// Returns the layer's per-expert counters for a token, or null if the token is not counted: a token without a
// KV slot is padding; if `slots` is null every token counts.
DEV u32* counters_of(u32* counts, const i64* slots, u64 token) {
    return counts && (!slots || slots[token] >= 0) ? counts : nullptr;
}
