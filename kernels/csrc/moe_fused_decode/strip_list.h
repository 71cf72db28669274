// moe_fused_decode/strip_list.h - the strips (16 packed rows of W each) of all active experts as one list (stream-K), of which
// every block processes an equal number of consecutive strips. A pass may include strips of several experts.
#pragma once
#include "moe_fused_decode/sort_choices.h"
#include "moe_grouped_gemm_tma/roles.h"

// Iterates over the passes of a block. A pass multiplies consecutive strips of the list by rows of x.
struct StripListWork {
    const Weight* w;
#if FP8
    ExpertScales scaling;
#endif
    const ExpertSortedTokens* sorted;
    u32 n, k;
    u32 at, end, each;  // next and end strip of this block; strips per pass
    u64 policy;
    u32 first_row, rows, first, strips;  // of the pass: first row of x and number of rows; first strip and number of strips
};
DEV StripListWork strips_of_block(const Weight* w, const ExpertSortedTokens& sorted, u32 n, u32 k) {
    const u64 all = (u64)sorted.all * (n / STRIP_LINES);
    const u32 at = (u32)(all * bid_x() / gdim_x()), end = (u32)(all * (bid_x() + 1) / gdim_x());
    const u32 passes = (end - at + STRIPS - 1) / STRIPS, equal = passes ? (end - at + passes - 1) / passes : 0;
    // A warpgroup with one strip takes as long as one with four.
    const u32 each = WEIGHTS_MXFP4 ? (equal + 3) / 4 * 4 : equal;
    StripListWork m{};
    m.w = w, m.sorted = &sorted, m.n = n, m.k = k, m.at = at, m.end = end, m.each = each;
    m.policy = read_once();
    return m;
}
// Advances to the next strips; false after the last ones.
DEV bool next_strips(StripListWork& m) {
    if (m.at >= m.end) return false;
    const u32 left = m.end - m.at;
    m.first = m.at;
    m.strips = left < m.each ? left : m.each;
    m.at += m.strips;
    return true;
}
DEV const ExpertSegment& segment_of(const StripListWork& m, u32 strip) { return m.sorted->segments[strip / (m.n / STRIP_LINES)]; }
DEV u32 row_of(const StripListWork& m, u32 r) { return m.first_row + r; }
DEV u32 columns_of(const StripListWork& m) { return m.k; }
DEV void copy_strips(const StripListWork& m, u8* to, u32 block, Barrier* full) {
    enum : u32 { TILE_STRIPS = TILE_LINES / STRIP_LINES };
    const u32 of_expert = m.n / STRIP_LINES, strip = (m.first + lane()) % of_expert;
    if (lane() >= m.strips || (lane() > 0 && strip % TILE_STRIPS > 0)) return;
    // Number of strips of this pass, beginning with the strip of this lane, that are contiguous in memory:
    // one bulk copy loads them.
    u32 run = TILE_STRIPS - strip % TILE_STRIPS;
    if (run > of_expert - strip) run = of_expert - strip;
    if (run > m.strips - lane()) run = m.strips - lane();
    const u32 expert = segment_of(m, m.first + lane()).expert;
    const Weight* from = m.w + expert * packed_size(m.n, m.k) + line_at(strip * STRIP_LINES, block, m.n, m.k);
    bulk_copy_once(to + lane() * STRIP_BYTES, from, run * STRIP_BYTES, full, m.policy);
}
