// moe_pack: matrices of experts as moe/lines.h says, by way of other memory; moe_unpack: back to where they were.
// CPU twin: none, its layout is its own.
//
// to, from half_t [E][N][K]; N a multiple of 16, K of 64. -DGATED=0|1: which order of lines.
// Grid: (N K / 2048, E). Block: 256, a piece of 8 columns each. Roofline: 8 N K bytes an expert, once.
#include "dev.h"
#include "moe/lines.h"

KERNEL(256) moe_pack(half_t* to, const half_t* from, u32 n, u32 k) {
    const u64 expert = (u64)bid_y() * n * k;
    const u32 at = bid_x() * bdim() + tid(), line = at / (k / 8), piece = at % (k / 8);
    if (line >= n) return;
    const u32 place = piece % PIECES ^ line % PIECES;
    const half_x8 v = *(const half_x8*)(from + expert + (u64)row_of_line(line, n, GATED) * k + piece * 8);
    *(half_x8*)(to + expert + line_at(line, piece / PIECES, n, k) + place * 8) = v;
}
EXPORT(moe_pack)

KERNEL(256) moe_unpack(half_x8* to, const half_x8* from, u32 n, u32 k) {
    const u32 at = bid_x() * bdim() + tid(), pieces = n * (k / 8);
    if (at < pieces) to[(u64)bid_y() * pieces + at] = from[(u64)bid_y() * pieces + at];
}
EXPORT(moe_unpack)
