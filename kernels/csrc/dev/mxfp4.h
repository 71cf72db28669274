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

// Factor of the elements of a group, 2^(scale - 1): twice as bf16, or as f32.
#if DEV_SM >= 900 && !HALF_F16
struct Mxfp4Factor { u32 pair; };
// `scales`: E8M0 bits of four groups, one per byte. A multiplication copies the byte to both halves, because the ALU pipe, which
// shifts and permutes, is the busiest one of a decoder.
DEV Mxfp4Factor mxfp4_factor(u32 scales, u32 group) {
    u32 scale;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(scale) : "r"(scales), "r"(0x4440u | group));
    return Mxfp4Factor{scale * 0x00800080u + 126u * 0x00800080u};
}
DEV u32 scaled_mxfp4_pair(u32 pair, Mxfp4Factor factor) {
    u32 product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(factor.pair));
    return product;
}
#else
struct Mxfp4Factor { float value; };
DEV Mxfp4Factor mxfp4_factor(u32 scales, u32 group) { return Mxfp4Factor{as_f32(((scales >> group * 8 & 0xff) + 126) << 23)}; }
// Returns two elements as half_t. `pair`: the elements in both halves, sign in bit 15, exponent and mantissa in bits 8
// to 6, in place of those of a bf16, whose exponent bias is 126 higher.
DEV u32 scaled_mxfp4_pair(u32 pair, Mxfp4Factor factor) {
    return pack_exact(f32x2{{as_f32(pair << 16) * factor.value, as_f32(pair & 0xffff0000u) * factor.value}});
}
#endif

// Decodes the eight elements of `word` to half_t; in bf16 the result is exact. `scale`: E8M0 bits.
DEV half_x8 decode_mxfp4(u32 word, u32 scale) {
    const Mxfp4Factor factor = mxfp4_factor(scale, 0);
    u32x4 pairs;
    UNROLL for (u32 j = 0; j < 4; ++j) {
        const u32 pair = word >> (4 * j);
        pairs.v[j] = scaled_mxfp4_pair((pair & 0x00070007u) << 6 | (pair & 0x00080008u) << 12, factor);
    }
    return bits_as<half_x8>(pairs);
}
