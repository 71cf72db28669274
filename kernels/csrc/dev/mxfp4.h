// dev/mxfp4.h - weights in MXFP4 (OCP Microscaling Formats 1.0, sections 5.3 and 6): groups of 32 successive elements
// of a row, each an E2M1 value of 4 bits, with one E8M0 scale 2^(s - 127) of 8 bits.
//
// A row is stored as its groups, of 16 bytes each, followed by their scales, padded to 16 bytes. A word has eight
// successive elements: element 2 j in bits 4 j to 4 j + 3, element 2 j + 1 in bits 4 j + 16 to 4 j + 19, so that one
// shift moves both elements of a pair into the two halves of a word. Scales are at most 2 (s = 128): the factor
// 2^(s - 1) of decode_mxfp4() is then a finite bf16. Must match kernels/src/gpu/mxfp4.rs.
#pragma once

enum : u32 { MXFP4_GROUP = 32, MXFP4_GROUP_BYTES = 16 };

// Returns the number of bytes of a row of k elements; k is a multiple of MXFP4_GROUP.
DEV u32 mxfp4_row_bytes(u32 k) { return k / 2 + (k / MXFP4_GROUP + 15) / 16 * 16; }
// Returns the address of the scales of a row.
DEV const u8* mxfp4_scales(const u8* row, u32 k) { return row + k / 2; }

// Decodes the eight elements of `word` to half_t; in bf16 the result is exact. `scale`: E8M0 bits.
DEV half_x8 decode_mxfp4(u32 word, u32 scale) {
    u32x4 pairs;
    UNROLL for (u32 j = 0; j < 4; ++j) {
        // Exponent and mantissa in place of those of a bf16, whose exponent bias is 126 higher.
        const u32 pair = word >> (4 * j), moved = (pair & 0x00070007u) << 6 | (pair & 0x00080008u) << 12;
#if DEV_SM >= 900 && !HALF_F16
        const u32 factor = (scale + 126) << 7 | (scale + 126) << 23;
        asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(pairs.v[j]) : "r"(moved), "r"(factor));
#else
        const float factor = as_f32((scale + 126) << 23);
        pairs.v[j] = pack_exact(f32x2{{as_f32(moved << 16) * factor, as_f32(moved & 0xffff0000u) * factor}});
#endif
    }
    return bits_as<half_x8>(pairs);
}
