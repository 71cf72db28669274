// mla_gather_kv: gathers compressed KV for long rows (mla_prefill/long_rows.h): it copies a window of the
// pool rows that they attend to into contiguous memory, the input of the GEMMs that compute keys and values
// (non-absorbed MLA). The padding of a row to whole steps is zero-filled, because freed blocks may contain
// NaN.
// CPU reference: cpu/mla/non_absorbed_attention.rs.
//
//   to    output [keys, to_stride], of which the first WIDTH columns are written
//   pool  KV pool of one layer, [slot][WIDTH]; cu_q, context_lens, tables, table_rows as in mla_decode
//
//   -DWIDTH=n (a multiple of 8)  -DBLOCK_TOKENS=n (a multiple of 16)
// Grid: keys of the window / 32. Block: 256.
// Roofline: bytes of the rows, read and written, over memory bandwidth.
#include "dev.h"
#include "mla_prefill/long_rows.h"

enum : u32 { RUN = 32, PIECES = WIDTH / 8, THREADS = 256 };  // RUN: keys per block

// Location of an entry of the list of keys of all long rows (long_rows.h): row, key position in the row, and
// context length of the row. `context` is 0 for indices after the last row.
struct KeyLocation { u32 row, key, context; };
DEV KeyLocation location_of(const LongRows& rows, u32 place) {
    u32 before = 0;
    for (u32 i = 0; i < rows.count; i += WARP_SIZE) {
        const RowLengths mine = lengths_of(rows, i + lane());
        const u32 span = span_of(mine), up_to = before + warp_inclusive_sum(span);
        const u32 at = warp_sum((u32)(up_to <= place));
        if (at < WARP_SIZE) return KeyLocation{rows.first + i + at, place - shfl(up_to - span, at), shfl(mine.context, at)};
        before = shfl(up_to, WARP_SIZE - 1);
    }
    return KeyLocation{};
}

KERNEL(256)
mla_gather_kv(half_t* to, const half_t* pool, const i32* cu_q, const i32* context_lens, const i32* tables,
              const i32* table_rows, u32 first, u32 count, u32 least, u32 begin, u32 table_width, u32 to_stride) {
    grid_wait();
    grid_launch_dependents();
    const LongRows rows{cu_q, context_lens, first, count, least};
    const KeyLocation location = location_of(rows, begin + bid_x() * RUN);  // Its RUN keys are of one row.
    if (location.context == 0) return;
    const i32* table = tables + (u64)(table_rows ? (u32)table_rows[location.row] : location.row) * table_width;
    half_t* out = to + (u64)bid_x() * RUN * to_stride;
    for (u32 i = tid(); i < RUN * PIECES; i += THREADS) {
        const u32 line = i / PIECES, piece = i % PIECES * 8, key = location.key + line;
        u32x4 values{{0, 0, 0, 0}};
        if (key < location.context) {
            const u64 slot = (u64)(u32)table[key / BLOCK_TOKENS] * BLOCK_TOKENS + key % BLOCK_TOKENS;
            values = *(const u32x4*)(pool + slot * WIDTH + piece);
        }
        *(u32x4*)(out + (u64)line * to_stride + piece) = values;
    }
}
EXPORT(mla_gather_kv)
