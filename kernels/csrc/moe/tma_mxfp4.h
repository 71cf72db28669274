// moe/tma_mxfp4.h - MXFP4 weights in the layout of moe/tma_layout.h, as a lane of a WGMMA needs them.
//
// A lane has four pairs of columns of each group of 32 columns of a line: 2 q, 2 q + 8, 2 q + 16 and 2 q + 24, where
// q = lane % 4, and the column after each. One word has these four pairs, so the 16-byte piece of a lane has its
// columns of four groups. The low half of a word has the first column of each pair, the high half the second one.
// Each of the four elements of a half is placed so that the sign and the exponent and mantissa reach the bits of a bf16 by one
// rotation of the word to the left, or by two for the last pair. Rotations by 4 and 6 are shifts, which a multiplication does:
// the ALU pipe, which rotates and masks, is the busiest one of the decoder.
//
//   pair   rotations   source of bits 15, 8, 7, 6 of a half, as a bit of the word for the low half
//   0       0          15, 8, 7, 6
//   1       6           9, 2, 1, 0
//   2      10           5, 30, 29, 28
//   3      12; 4        3, 27, 26; bit 8: 4
#pragma once
#include "dev/mxfp4.h"

enum : u32 { LINE_ELEMENT_BYTES = 64, STRIP_SCALES = STRIP_LINES * LINE_ELEMENT_BYTES, PAIRS = 4 };

enum : u32 {
    ELEMENT_BITS = 0x81c081c0u,   // sign, exponent and mantissa of an element in both halves
    SIGN_BITS = 0x80c080c0u,      // the sign, the low bit of the exponent, and the mantissa
    EXPONENT_BIT = 0x01000100u    // the high bit of the exponent
};
DEV u32 rotated_left(u32 word, u32 count) { return word << count | word >> (32 - count); }

// Returns the word of four pairs; `pair` returns pair p as the bits 0 to 3 of both halves of a word.
template <class Pair> DEV u32 join_mxfp4_pairs(const Pair& pair) {
    const auto placed = [&](u32 p) {
        const u32 bits = pair(p);
        return (bits & 0x00080008u) << 12 | (bits & 0x00070007u) << 6;
    };
    const u32 last = placed(3);
    return placed(0) | placed(1) >> 6 | rotated_left(placed(2), 22) | rotated_left(last & SIGN_BITS, 20) | (last & EXPONENT_BIT) >> 4;
}

// Pairs of a word as half_t.
struct DecodedPairs { u32 v[PAIRS]; };
// Decodes a word; in bf16 the result is exact. `scales`: E8M0 bits of four groups, one per byte; at most 128
// (dev/mxfp4.h). `group`: index of the group of the word.
DEV DecodedPairs decode_mxfp4_pairs(u32 word, u32 scales, u32 group) {
    const u32 moved[PAIRS] = {word & ELEMENT_BITS, word << 6 & ELEMENT_BITS, rotated_left(word, 10) & ELEMENT_BITS,
                              (rotated_left(word, 12) & SIGN_BITS) | (word << 4 & EXPONENT_BIT)};
    const Mxfp4Factor factor = mxfp4_factor(scales, group);
    DecodedPairs pairs;
    UNROLL for (u32 p = 0; p < PAIRS; ++p) pairs.v[p] = scaled_mxfp4_pair(moved[p], factor);
    return pairs;
}
