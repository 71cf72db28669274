// Keys that a query attends to: sliding windows and attention sinks.
#pragma once
#include "dev.h"

// First key of a query that has `seen` keys up to its own position: max(first_position, seen - window).
DEV u32 first_key_of(u32 seen, u32 window, u32 first_position) {
    const u32 begin = seen > window ? seen - window : 0;
    return begin > first_position ? begin : first_position;
}

// Sum of probabilities, extended by the sink of a query head. `sum` is relative to `max`, which is in units of
// log2(e); sinks are in natural units. Overflows to infinity, for which the output is 0, if the sink exceeds
// every score by 128.
DEV float with_sink(float sum, float max, const float* sinks, u32 head) {
    return sinks ? sum + exp2_(sinks[head] * 1.44269504f - max) : sum;
}
