// moe/tma_layout.h - how experts' weights lie where the copy engine streams them to wgmma.
//
// An expert's matrix [N, K], N a multiple of 16 and K of COLUMNS, is kept as lines: its rows in another order, 16 to a strip.
// GATED: 8 gate rows, then the up rows of the same outputs; else the even of 16 rows, then the odd ones. Either way a lane
// of the product holds in its two lines what belongs together.
// 128 lines make a tile (the last may be lower). In a tile lie COLUMNS columns of all its lines, then the next ones, 128 bytes
// of a line: 64 columns of half_t, of which piece p of 16 bytes lies at place p ^ line % 8. That is a panel of dev/wgmma.h, so
// that any strips of a tile are one copy, of 2 KiB a strip and COLUMNS.
//
// With FP8 128 columns, which share a scale. A lane turns its values into half_t, which are registers of a product: of 16 columns
// those at 2 q, 2 q + 1, 2 q + 8, and 2 q + 9, q = lane % 4. Its piece of 16 bytes has them of 64 columns, a word for each 16, so
// that two words of half_t are in the upper and in the lower bytes of it: columns 2 q + 8, 2 q, 2 q + 9, 2 q + 1. Pieces of the
// upper 64 columns lie behind the others, in odd lines before them: eight lanes read 128 bytes from as many banks.
#pragma once

#ifndef FP8
#  define FP8 0
#endif
#if FP8
typedef fp8 Weight;
#else
typedef half_t Weight;
#endif

enum : u32 { STRIP_LINES = 16, TILE_LINES = 128, COLUMN_BYTES = 128, COLUMNS = COLUMN_BYTES / sizeof(Weight), PIECES = COLUMN_BYTES / 16 };

// Row of W in a line.
DEV u32 row_of_tma_line(u32 line, u32 n, bool gated) {
    const u32 strip = line / STRIP_LINES, i = line % STRIP_LINES;
    return gated ? i / 8 * (n / 2) + strip * 8 + i % 8 : strip * 16 + i % 8 * 2 + i / 8;
}

// Element of an expert where columns [COLUMNS block, + COLUMNS) of a line begin.
DEV u64 line_at(u32 line, u32 block, u32 n, u32 k) {
    const u32 first = line / TILE_LINES * TILE_LINES, height = n - first < TILE_LINES ? n - first : (u32)TILE_LINES;
    return (u64)first * k + ((u64)block * height + line - first) * COLUMNS;
}

#if FP8
// Bytes from a line's begin to the piece of `lane` in the lower or the upper 64 columns.
DEV u32 piece_at(u32 line, u32 lane, u32 upper) { return ((upper ^ line % 2) * 4 + lane % 4) * 16; }

// Scales of experts: f32 of `unit` rows of W, a multiple of 16, and 128 columns; `stride` between rows of them.
struct Scaling { const float* scales; u32 unit, stride; };
// Of the first or the second eight lines of a strip; the next 128 columns have the next one.
DEV const float* scale_of(const Scaling& s, u32 expert, u32 strip, u32 half, u32 n, bool gated) {
    const u32 row = row_of_tma_line(strip * STRIP_LINES + half * 8, n, gated);
    return s.scales + ((u64)expert * (n / s.unit) + row / s.unit) * s.stride;
}
#endif
