// Keys that a query attends to: sliding windows and attention sinks.
//
// -DWINDOWED=1: the kernel has the argument `window`, the maximum number of keys that a query attends to.
// -DSINKS=1: the kernel has the argument `sinks` [query heads], one score per query head, which joins the
// denominator of the softmax. attention_plain has both arguments without these defines.
#pragma once
#include "dev.h"

#ifndef WINDOWED
#  define WINDOWED 0
#endif
#ifndef SINKS
#  define SINKS 0
#endif

// Parameters of a kernel for the window and the sinks, and their values as the last fields of a struct.
#if WINDOWED
#  define WINDOW_PARAM , u32 window
#  define WINDOW_VALUE , window
#else
#  define WINDOW_PARAM
#  define WINDOW_VALUE
#endif
#if SINKS
#  define SINKS_PARAM , const float* sinks
#  define SINKS_VALUE , sinks
#else
#  define SINKS_PARAM
#  define SINKS_VALUE
#endif
#define KEY_RANGE_PARAMS WINDOW_PARAM SINKS_PARAM

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
