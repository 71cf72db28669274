// moe/tma_layout.h - packed layout of expert weights for bulk copies and WGMMA.
//
// An expert's matrix [N, K] (N a multiple of 16, K of COLUMNS) is stored as lines: its rows, reordered in
// strips of 16. With GATED a strip has 8 gate rows, then the up rows of the same outputs; else the 8 even
// rows of 16 rows, then the odd ones. A lane of the WGMMA has lines i and i + 8 of a strip: gate and up of
// one output, or two adjacent outputs.
// 128 lines are a tile (the last tile may have fewer). A tile stores COLUMNS columns of all its lines, then
// the next COLUMNS columns. Each line has 128 bytes: with half_t 64 columns, 16-byte piece p at index p ^
// line % 8. This is a panel of dev/wgmma.h, so that consecutive strips of a tile are loaded by one bulk copy:
// COLUMNS columns of a strip have 2 KiB.
//
// With FP8 a line has 128 columns, which share a scale. A lane converts its values to half_t for the A
// registers of a WGMMA. Of 16 columns it needs 2 q, 2 q + 1, 2 q + 8 and 2 q + 9, where q = lane % 4. Its
// 16-byte piece has these values for 64 columns, one word per 16 columns, in the byte order 2 q + 8, 2 q, 2 q
// + 9, 2 q + 1, so that the upper and the lower bytes of the word's halves convert to one register each.
// Pieces of the upper 64 columns are after those of the lower in even lines and before them in odd lines:
// eight lanes read 128 bytes without bank conflicts.
//
// With WEIGHTS_MXFP4 a strip has 128 columns of its 16 lines, 64 bytes each, then the scales of the lines, four bytes
// each: 1,088 bytes (moe/tma_mxfp4.h). K is a multiple of 32; columns from K to the next multiple of 128 are zeros.
#pragma once

#ifndef FP8
#  define FP8 0
#endif
#ifndef WEIGHTS_MXFP4
#  define WEIGHTS_MXFP4 0
#endif
#if FP8
typedef fp8 Weight;
#elif WEIGHTS_MXFP4
typedef u8 Weight;
#else
typedef half_t Weight;
#endif

enum : u32 {
    STRIP_LINES = 16,
    TILE_LINES = 128,
    COLUMN_BYTES = WEIGHTS_MXFP4 ? 68 : 128,  // bytes of COLUMNS columns of a line; in MXFP4 with their scales
    COLUMNS = WEIGHTS_MXFP4 ? 128 : 128 / sizeof(Weight),
    PIECES = 8  // 16-byte pieces of a line of 128 bytes
};

// Returns the number of blocks of COLUMNS columns of a line.
DEV u32 column_blocks(u32 k) { return (k + COLUMNS - 1) / COLUMNS; }
// Returns the size in elements of Weight of the packed matrix of an expert.
DEV u64 packed_size(u32 n, u32 k) { return (u64)n * column_blocks(k) * (COLUMN_BYTES / sizeof(Weight)); }

// Returns the row of W that is stored in line `line` of the packed layout.
DEV u32 row_of_tma_line(u32 line, u32 n, bool gated) {
    const u32 strip = line / STRIP_LINES, i = line % STRIP_LINES;
    return gated ? i / 8 * (n / 2) + strip * 8 + i % 8 : strip * 16 + i % 8 * 2 + i / 8;
}

// Returns the offset in elements, from the start of the packed matrix of an expert, of columns [COLUMNS *
// block, COLUMNS * (block + 1)) of line `line`; in MXFP4 of a strip whose first line is `line`.
DEV u64 line_at(u32 line, u32 block, u32 n, u32 k) {
    const u32 first = line / TILE_LINES * TILE_LINES, height = n - first < TILE_LINES ? n - first : (u32)TILE_LINES;
    return ((u64)first * column_blocks(k) + (u64)block * height + line - first) * (COLUMN_BYTES / sizeof(Weight));
}

#if FP8
// Returns the offset in bytes, from the start of a line (128 fp8 columns), of the 16-byte piece that `lane`
// reads: its values of the lower (upper = 0) or the upper 64 columns.
DEV u32 piece_at(u32 line, u32 lane, u32 upper) { return ((upper ^ line % 2) * 4 + lane % 4) * 16; }

// Scales of expert weights: f32, one per `unit` rows of W (a multiple of 16) and 128 columns, with row stride
// `stride`.
struct ExpertScales { const float* scales; u32 unit, stride; };
// Returns the address of the scale of the first (half = 0) or second eight lines of a strip, for columns 0 to
// 127; the scales for the following groups of 128 columns are stored after it.
DEV const float* scale_of(const ExpertScales& s, u32 expert, u32 strip, u32 half, u32 n, bool gated) {
    const u32 row = row_of_tma_line(strip * STRIP_LINES + half * 8, n, gated);
    return s.scales + ((u64)expert * (n / s.unit) + row / s.unit) * s.stride;
}
#endif
