// moe/tma_mxfp4.h - MXFP4 weights in the layout of moe/tma_layout.h, as a lane of a WGMMA needs them.
//
// A lane has four pairs of columns of each group of 32 columns of a line: 2 q, 2 q + 8, 2 q + 16 and 2 q + 24, where
// q = lane % 4, and the column after each. One word has these four pairs, so the 16-byte piece of a lane has its
// columns of four groups. The low half of a word has the first column of each pair, the high half the second one.
// The bits of the four elements of a half are placed so that at most one shift moves an element to the bits of a bf16,
// except for the last pair:
//
//   pair   sign    exponent and mantissa   to bf16 (sign 15, exponent and mantissa 8 to 6)
//   0      15      8, 7, 6                 as it is
//   1      12      5, 4, 3                 << 3
//   2       9      2, 1, 0                 << 6
//   3      14      13; 11, 10              << 1; >> 5; >> 4
#pragma once
#include "dev/mxfp4.h"

enum : u32 { LINE_ELEMENT_BYTES = 64, STRIP_SCALES = STRIP_LINES * LINE_ELEMENT_BYTES, PAIRS = 4 };

// Returns the word of four pairs; `pair` returns pair p as the bits 0 to 3 of both halves of a word.
template <class Pair> DEV u32 join_mxfp4_pairs(const Pair& pair) {
    const u32 a = pair(0), b = pair(1), c = pair(2), d = pair(3), sign = 0x00080008u, rest = 0x00070007u;
    return (a & sign) << 12 | (a & rest) << 6 | (b & sign) << 9 | (b & rest) << 3 | (c & sign) << 6 | (c & rest) |
           (d & 0x000c000cu) << 11 | (d & 0x00030003u) << 10;
}

// Pairs of a word as half_t.
struct DecodedPairs { u32 v[PAIRS]; };
// Decodes a word; in bf16 the result is exact. `scales`: E8M0 bits of four groups, one per byte; at most 128
// (dev/mxfp4.h). `group`: index of the group of the word.
DEV DecodedPairs decode_mxfp4_pairs(u32 word, u32 scales, u32 group) {
    const u32 bits = 0x81c081c0u;
    const u32 moved[PAIRS] = {word & bits, word << 3 & bits, word << 6 & bits,
                              (word << 1 & 0x80008000u) | (word >> 5 & 0x01000100u) | (word >> 4 & 0x00c000c0u)};
    const Mxfp4Factor factor = mxfp4_factor(scales, group);
    DecodedPairs pairs;
    UNROLL for (u32 p = 0; p < PAIRS; ++p) pairs.v[p] = scaled_mxfp4_pair(moved[p], factor);
    return pairs;
}
