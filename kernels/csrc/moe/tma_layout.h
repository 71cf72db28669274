// moe/tma_layout.h - packed layout of expert weights for bulk copies and WGMMA.
//
// An expert's matrix [N, K], N a multiple of 16 and K of COLUMNS, is stored as lines: its rows in another
// order, 16 lines per strip. GATED: 8 gate rows, then the up rows of the same outputs; else the even of 16
// rows, then the odd ones. In both cases a lane of the WGMMA has related rows in its two lines.
// 128 lines are a tile (the last may have fewer). A tile stores COLUMNS columns of all its lines, then the
// next COLUMNS columns. Each line has 128 bytes: with half_t 64 columns, 16-byte piece p at index p ^ line %
// 8. This is a panel of dev/wgmma.h, so that any consecutive strips of a tile are one copy, of 2 KiB per
// strip and COLUMNS.
//
// With FP8 a line has 128 columns, which share a scale. A lane converts its values to half_t registers of the
// A operand of a WGMMA: of 16 columns those at 2 q, 2 q + 1, 2 q + 8 and 2 q + 9, q = lane % 4. Its 16-byte
// piece has them of 64 columns, one word per 16 columns, so that two words of half_t are the upper and the
// lower bytes of it: columns 2 q + 8, 2 q, 2 q + 9, 2 q + 1. Pieces of the upper 64 columns are after the
// others in even lines, before them in odd lines: eight lanes read 128 bytes without bank conflicts.
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

// Row of W of a line.
DEV u32 row_of_tma_line(u32 line, u32 n, bool gated) {
    const u32 strip = line / STRIP_LINES, i = line % STRIP_LINES;
    return gated ? i / 8 * (n / 2) + strip * 8 + i % 8 : strip * 16 + i % 8 * 2 + i / 8;
}

// Element offset, within an expert, of columns [COLUMNS block, + COLUMNS) of a line.
DEV u64 line_at(u32 line, u32 block, u32 n, u32 k) {
    const u32 first = line / TILE_LINES * TILE_LINES, height = n - first < TILE_LINES ? n - first : (u32)TILE_LINES;
    return (u64)first * k + ((u64)block * height + line - first) * COLUMNS;
}

#if FP8
// Offset in bytes from a line's start to the piece of `lane` in the lower or the upper 64 columns.
DEV u32 piece_at(u32 line, u32 lane, u32 upper) { return ((upper ^ line % 2) * 4 + lane % 4) * 16; }

// Scales of experts: f32, one per `unit` rows of W (a multiple of 16) and 128 columns; `stride` between rows
// of scales.
struct Scaling { const float* scales; u32 unit, stride; };
// Scale of the first or the second eight lines of a strip; the next element is that of the next 128 columns.
DEV const float* scale_of(const Scaling& s, u32 expert, u32 strip, u32 half, u32 n, bool gated) {
    const u32 row = row_of_tma_line(strip * STRIP_LINES + half * 8, n, gated);
    return s.scales + ((u64)expert * (n / s.unit) + row / s.unit) * s.stride;
}
#endif
