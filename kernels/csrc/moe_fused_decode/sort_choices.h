// moe_fused_decode/sort_choices.h - sorts up to 64 choices ((token, expert) pairs) by expert. Every block of
// the kernel sorts all choices itself.
#pragma once
#include "moe/segment.h"

#ifndef EQUAL_SHARES
#  define EQUAL_SHARES 0
#endif

enum : u32 { MOST_CHOICES = 64, NO_PLACE = ~0u };

// Choices (pairs of token and expert) sorted by expert, then by token, in shared memory. A place is an
// index in this order.
struct ExpertSortedTokens {
    u32 all, places;                // number of segments (active experts); number of choices of this rank
    u32 token[MOST_CHOICES];        // token of a place
    float routing_weight[MOST_CHOICES];  // routing weight of a place
    ExpertSegment segments[MOST_CHOICES]; // one per active expert; `first` is a place
#if EQUAL_SHARES
    u32 places_of_token[MOST_CHOICES];  // places of the choices of a token in ascending order, then NO_PLACE
#endif
};

// Sorts the choices by expert into `s`. Thread t passes the expert `e` and the routing weight of choice t;
// threads t >= `choices` have no choice. Experts [first, first + count) are on this rank; other choices are
// dropped. Every thread of the block must call it; the block has at least MOST_CHOICES threads.
DEV void sort_choices(ExpertSortedTokens& s, u32 e, float routing_weight, u32 choices, u32 first, u32 count,
                      u32 top_k) {
    SHARED(u32, chosen, MOST_CHOICES);
    SHARED(u32, first_flags, MOST_CHOICES);  // whether a choice is the first of its expert
    const u32 c = tid();
    e = c < choices && e - first < count ? e - first : ~0u;
    if (c < choices) chosen[c] = e;
    if (c == 0) s.all = s.places = 0;
    sync();
    u32 place = 0, rows = 0, before = 0;
    if (e != ~0u)
        for (u32 j = 0; j < choices; ++j) {
            const u32 other = chosen[j];
            place += other < e || (other == e && j < c);
            rows += other == e;
            before += other == e && j < c;
        }
#if EQUAL_SHARES
    if (c < choices) {
        const u32 first_choice = c / top_k * top_k;
        u32 rank = 0;
        for (u32 j = first_choice; j < first_choice + top_k; ++j) rank += chosen[j] < e || (chosen[j] == e && j < c);
        s.places_of_token[first_choice + rank] = e != ~0u ? place : NO_PLACE;
    }
#endif
    const bool first_of_expert = e != ~0u && before == 0;
    if (c < choices) first_flags[c] = first_of_expert;
    if (e != ~0u) {
        s.token[place] = c / top_k;
        s.routing_weight[place] = routing_weight;
        atomic_add(&s.places, 1);
    }
    sync();
    if (first_of_expert) {
        u32 segment = 0;
        for (u32 j = 0; j < choices; ++j) segment += first_flags[j] && chosen[j] < e;
        s.segments[segment] = ExpertSegment{e, place, rows, 0};
        atomic_add(&s.all, 1);
    }
    sync();
}
