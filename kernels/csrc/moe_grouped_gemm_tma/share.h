// moe_grouped_gemm_tma/share.h - division of the work among blocks. A block processes passes; a pass
// multiplies some strips (16 packed rows of W each) of one expert by the rows of x of one segment.
#pragma once
#include "moe/segment.h"
#include "moe_grouped_gemm_tma/roles.h"

// Work of a block, and its current pass. WIDE_TILE=0: the strips (16 packed rows of W each) of all segments
// form one list, and every block processes an equal number of consecutive strips, so that all blocks finish
// at the same time. WIDE_TILE=1: blocks take tiles in round-robin order, so that concurrent blocks share
// experts and rows in L2.
struct BlockWorkCursor {
    const Weight* w;
#if FP8
    ExpertScales scaling;
#endif
    const ExpertSegment* segments;
    const u32* order;  // row of x = token of the choice at a position; null: row of x = position
    u32 n, k, top_k;
    u32 at, end;       // next and end: index of tiles with WIDE_TILE, else of strips
    u32 begun;         // columns of the first pass that begin_weights() loads, even if it has no rows
    u64 policy;
    u32 expert, position, rows, first, strips, columns;
};
DEV BlockWorkCursor share_of_block(const Weight* w, const ExpertSegment* segments, u32 all, const u32* order, u32 n,
                                   u32 k, u32 top_k) {
    const u32 strips = n / STRIP_LINES;
    const u64 units = (u64)all * (WIDE_TILE ? (strips + STRIPS - 1) / STRIPS : strips);
    const u32 at = WIDE_TILE ? bid_x() : (u32)(units * bid_x() / gdim_x());
    const u32 end = WIDE_TILE ? (u32)units : (u32)(units * (bid_x() + 1) / gdim_x());
    BlockWorkCursor s{};
    s.w = w, s.segments = segments, s.order = order, s.n = n, s.k = k, s.top_k = top_k;
    s.at = at, s.end = end, s.policy = read_once();
    return s;
}
// Sets s.first and s.strips: the first strip and the number of strips of the pass that begins at s.at.
DEV void take_strips(BlockWorkCursor& s) {
    const u32 all = s.n / STRIP_LINES, each = WIDE_TILE ? (all + STRIPS - 1) / STRIPS : all;
    s.first = s.at % each * (WIDE_TILE ? (u32)STRIPS : 1);
    const u32 left = all - s.first, mine = WIDE_TILE ? left : s.end - s.at, most = left < mine ? left : mine;
    s.strips = most < STRIPS ? most : (u32)STRIPS;
}
DEV u32 segment_at(const BlockWorkCursor& s) {
    const u32 all = s.n / STRIP_LINES;
    return s.at / (WIDE_TILE ? (all + STRIPS - 1) / STRIPS : all);
}
DEV bool next_pass(BlockWorkCursor& s) {
    while (s.at < s.end) {
        const ExpertSegment segment = load_segment(s.segments + segment_at(s));
        s.expert = segment.expert, s.position = segment.first, s.rows = segment.rows;
        take_strips(s);
        s.at += WIDE_TILE ? gdim_x() : s.strips;
        s.columns = s.rows > 0 ? s.k : s.begun;
        s.begun = 0;
        if (s.columns > 0) return true;
    }
    return false;
}
DEV u32 row_of(const BlockWorkCursor& s, u32 r) { return s.order ? s.order[s.position + r] / s.top_k : s.position + r; }
DEV u32 columns_of(const BlockWorkCursor& s) { return s.columns; }
#if FP8
DEV const float* scales_of(const BlockWorkCursor& s, u32 strip, u32 half) {
    return scale_of(s.scaling, s.expert, s.first + strip, half, s.n, GATED);
}
#endif
DEV void copy_strips(const BlockWorkCursor& s, u8* to, u32 block, Barrier* full) {
    if (lane() != 0) return;
    const Weight* expert = s.w + s.expert * packed_size(s.n, s.k);
    u32 line = s.first * STRIP_LINES, left = s.strips * STRIP_LINES;
#pragma unroll 1
    while (left > 0) {
        const u32 fit = TILE_LINES - line % TILE_LINES, lines = left < fit ? left : fit;
        const Weight* from = expert + line_at(line, block, s.n, s.k);
        // With many rows per expert, other blocks read the same weights, which should therefore stay in L2.
        if (WIDE_TILE && ROWS > 32) bulk_copy(to, from, lines * COLUMN_BYTES, full);
        else bulk_copy_once(to, from, lines * COLUMN_BYTES, full, s.policy);
        to += lines * COLUMN_BYTES, line += lines, left -= lines;
    }
}

// Starts loading the weights of the first pass of this block before routing has determined its rows, for at
// most as many stages as the ring buffer has. Returns the number of stages. Segment e, for each e <
// `experts`, must be the first segment of expert e.
DEV u32 begin_weights(const Weight* w, const StageRing& ring, u32 n, u32 k, u32 experts) {
    BlockWorkCursor s = share_of_block(w, nullptr, 0, nullptr, n, k, 0);
    s.expert = segment_at(s);
    if (s.expert >= experts) return 0;
    take_strips(s);
    const u32 blocks = ring.stages < column_blocks(k) ? ring.stages : column_blocks(k);
    if (warp_id() == WEIGHT_WARP)
        for (u32 i = 0; i < blocks; ++i) copy_block(s, ring, i, i);
    return blocks;
}
