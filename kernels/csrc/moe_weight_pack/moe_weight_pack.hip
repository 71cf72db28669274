// moe_weight_pack packs expert weights from `from` into `to`, in the layout of moe/tma_layout.h. With
// -DWEIGHTS_MXFP4=1, `from` has rows of dev/mxfp4.h, and K is a multiple of 32.
// moe_weight_unpack copies the packed weights back to the buffer of the original weights. CPU reference:
// none, because only the GPU kernels use this layout.
//
// to, from [experts][N][K] of half_t, or of fp8 with -DFP8=1; N is a multiple of 16, K of COLUMNS.
// -DGATED=0|1 selects the order of lines.
// scales: block scales of the fp8 weights. The GEMM kernels convert fp8 bits without a check for NaN;
// therefore the scale of a block with a NaN weight is set to NaN.
// Grid: (16-byte pieces of an expert / 256, experts); MXFP4: (rows times column blocks / 256, experts). Block: 256. Roofline: packing moves each byte four
// times (read and written by both kernels); it runs once, at start-up.
#include "dev.h"
#include "moe/tma_layout.h"
#if WEIGHTS_MXFP4
#  include "moe/tma_mxfp4.h"
#endif

enum : u32 { PIECE = 16 / sizeof(Weight) };  // weights per piece

#if FP8
// Returns 32-bit word i of the 16-byte piece that `lane` reads, in the byte order of moe/tma_layout.h: its
// four values of columns [16 i, 16 i + 16).
DEV u32 word_of(const u8* columns, u32 lane, u32 i) {
    const u8* p = columns + i * 16 + lane % 4 * 2;
    return (u32)p[8] | (u32)p[0] << 8 | (u32)p[9] << 16 | (u32)p[1] << 24;
}
// Whether any of the four fp8 values in `word` is NaN.
DEV bool holds_nan(u32 word) {
    bool any = false;
    UNROLL for (u32 i = 0; i < 4; ++i) any |= (word >> i * 8 & 0x7f) == 0x7f;
    return any;
}

KERNEL(256) moe_weight_pack(u8* to, const u8* from, u32 n, u32 k, float* scales, u32 unit, u32 scale_stride) {
    const u32 at = bid_x() * bdim() + tid(), line = at / (k / PIECE), piece = at % (k / PIECE), expert = bid_y();
    if (line >= n) return;
    const u32 block = piece / PIECES, upper = piece / 4 % 2, row = row_of_tma_line(line, n, GATED);
    const u64 matrix = (u64)expert * n * k;
    const u8* columns = from + matrix + (u64)row * k + block * COLUMNS + upper * 64;
    u32x4 words;
    UNROLL for (u32 i = 0; i < 4; ++i) words.v[i] = word_of(columns, piece, i);
    *(u32x4*)(to + matrix + line_at(line, block, n, k) + piece_at(line, piece, upper)) = words;
    bool nan = false;
    UNROLL for (u32 i = 0; i < 4; ++i) nan |= holds_nan(words.v[i]);
    if (nan) scales[((u64)expert * (n / unit) + row / unit) * scale_stride + block] = as_f32(0x7fc00000u);
}
#elif WEIGHTS_MXFP4
// Four groups of 32 columns of a row, and their scales; zeros past the last column.
struct RowGroups { u32x4 words[4]; u32 scales; };
DEV RowGroups row_groups(const u8* row, u32 block, u32 k) {
    RowGroups groups{};
    UNROLL for (u32 i = 0; i < 4; ++i) {
        const u32 group = block * 4 + i;
        if (group >= k / MXFP4_GROUP) break;
        groups.words[i] = *(const u32x4*)(row + group * MXFP4_GROUP_BYTES);
        groups.scales |= (u32)mxfp4_scales(row, k)[group] << i * 8;
    }
    return groups;
}

KERNEL(256) moe_weight_pack(u8* to, const u8* from, u32 n, u32 k) {
    const u32 at = bid_x() * bdim() + tid(), blocks = column_blocks(k), line = at / blocks, block = at % blocks, in_strip = line % STRIP_LINES;
    if (line >= n) return;
    const u8* row = from + ((u64)bid_y() * n + row_of_tma_line(line, n, GATED)) * mxfp4_row_bytes(k);
    const RowGroups groups = row_groups(row, block, k);
    u8* strip = to + bid_y() * packed_size(n, k) + line_at(line - in_strip, block, n, k);
    UNROLL for (u32 q = 0; q < 4; ++q) {
        u32x4 words;
        UNROLL for (u32 i = 0; i < 4; ++i)
            words.v[i] = join_mxfp4_pairs([&](u32 pair) { return groups.words[i].v[pair] >> 4 * q & 0x000f000fu; });
        *(u32x4*)(strip + in_strip * LINE_ELEMENT_BYTES + q * 16) = words;
    }
    *(u32*)(strip + STRIP_SCALES + in_strip * 4) = groups.scales;
}
#else
KERNEL(256) moe_weight_pack(half_t* to, const half_t* from, u32 n, u32 k) {
    const u64 expert = (u64)bid_y() * n * k;
    const u32 at = bid_x() * bdim() + tid(), line = at / (k / PIECE), piece = at % (k / PIECE);
    if (line >= n) return;
    const u32 place = piece % PIECES ^ line % PIECES;
    const half_x8 v = *(const half_x8*)(from + expert + (u64)row_of_tma_line(line, n, GATED) * k + piece * PIECE);
    *(half_x8*)(to + expert + line_at(line, piece / PIECES, n, k) + place * PIECE) = v;
}
#endif
EXPORT(moe_weight_pack)

KERNEL(256) moe_weight_unpack(u32x4* to, const u32x4* from, u32 n, u32 k) {
    const u32 at = bid_x() * bdim() + tid(), pieces = n * (k / PIECE);
    if (at < pieces) to[(u64)bid_y() * pieces + at] = from[(u64)bid_y() * pieces + at];
}
EXPORT(moe_weight_unpack)
