// attention_decode/split_schedule.h - assigns splits to blocks. The splits of all rows and KV heads form one
// list: rows in order, heads within a row, splits within a head. Each block processes an equal number of
// consecutive splits of the list, so that every SM reads the same number of keys for any context lengths. The
// assignment is computed on the device, so a captured graph works for context lengths that are known only on
// the device. The rows of a request with draft tokens (one token per row) are processed together and read
// their context once, unless the rows have so few splits that each split gets a block of its own: then
// separate blocks have lower latency.
#pragma once
#include "attention/key_range.h"
#include "dev/scalar.h"

// Returns the number of splits of a context. A row without keys has one empty split, which writes zeros to
// the output. `split_log2`: log2 of the split length chosen for all rows of a step, if the kernel uses one
// (mla_decode_wgmma/split_length.h).
DEV u32 splits_of(u32 context, u32 split_log2) { return context == 0 ? 1 : splits_of_keys(context, split_log2); }

// Arrays and sizes that describe the rows of the step, from the arguments of the kernel.
struct BatchMetadata {
    const i32 *context_lens, *cu_q, *tables, *table_rows;
    u32 rows, kv_heads, table_width;
    const i32* positions;  // positions of tokens; null if not needed
    u32 tokens_per_group;  // maximum number of successive tokens of a request processed together
    u32 max_new_tokens;    // maximum number of tokens of a request per step, whose keys may be new
#if WINDOWED
    u32 window;            // maximum number of keys that a token attends to
#endif
};

// A position in the list of all splits: the split, and its row, KV head and context.
struct SplitCursor {
    u32 row, head, split, left;  // left: number of splits from here to the end of the block's run
    u32 context, table, token, position;  // context of the group's last row; the others of its first row
    u32 span, splits, split_log2;
    u32 record;    // index of the row's first record: number of splits of all earlier rows
    u32 count;    // rows of the group, from `row` on; each attends to one key more than the previous one
    u32 tokens_per_group;  // as in BatchMetadata, or 1 if rows are scheduled separately
    u32 run_end;  // end of the run of tokens; used by mla_decode/token.h only
#if WINDOWED
    u32 origin;   // first key of the first split
#endif
};

DEV u32 position_of(const BatchMetadata& rows, u32 token) {
    return rows.positions ? (u32)load_scalar(rows.positions + token) : 0;
}
DEV u32 table_of(const BatchMetadata& rows, u32 row) {
    return rows.table_rows ? (u32)load_scalar(rows.table_rows + row) : row;
}
// Returns the first key of the first split of a row: the first key of its window, rounded down to a tile. Earlier
// keys are neither read nor counted, and a tile has the same keys whatever the window.
#if WINDOWED
DEV u32 origin_of(const BatchMetadata& rows, u32 context) {
    return first_key_of(context, rows.window, 0) / TILE_KEYS * TILE_KEYS;
}
DEV u32 origin_of(const SplitCursor& p) { return p.origin; }
#else
DEV u32 origin_of(const BatchMetadata&, u32) { return 0; }
DEV u32 origin_of(const SplitCursor&) { return 0; }
#endif
// Returns the number of splits of a row with `context` keys, and the number of keys per split.
DEV u32 row_splits(const BatchMetadata& rows, u32 context, u32 split_log2) {
    return splits_of(context - origin_of(rows, context), split_log2);
}
DEV u32 span_of(const BatchMetadata& rows, u32 context, u32 split_log2) {
    return even_split(context - origin_of(rows, context), row_splits(rows, context, split_log2));
}

DEV void split_row(SplitCursor& p, const BatchMetadata& rows) {
#if WINDOWED
    p.origin = origin_of(rows, p.context);
#endif
    p.splits = uniform(row_splits(rows, p.context, p.split_log2));
    p.span = uniform(even_split(p.context - origin_of(p), p.splits));
}

// Whether `row` is the token after that of the previous row in the same request, and both rows are cut into
// the same splits. (Every row has one token.)
DEV bool follows_previous_row(const BatchMetadata& rows, u32 row, u32 split_log2) {
    if (row == 0 || table_of(rows, row) != table_of(rows, row - 1)) return false;
    const u32 before = (u32)load_scalar(rows.context_lens + (row - 1));
    const u32 context = (u32)load_scalar(rows.context_lens + row);
    return before != 0 && context == before + 1 && origin_of(rows, before) == origin_of(rows, context) &&
           row_splits(rows, before, split_log2) == row_splits(rows, context, split_log2) &&
           (GROUP_SPLIT_LENGTH || span_of(rows, before, split_log2) == span_of(rows, context, split_log2));
}
// Whether `row` is the first of a group: up to `tokens_per_group` successive tokens of one request that are
// processed together.
DEV bool is_group_leader(const BatchMetadata& rows, u32 row, u32 tokens_per_group, u32 split_log2) {
    if (tokens_per_group <= 1) return true;
    u32 distance = 0;
    while (follows_previous_row(rows, row - distance, split_log2)) ++distance;
    return distance % tokens_per_group == 0;
}
// Extends `p` from the first row of a group (successive tokens of one request that are processed together) to
// all rows of the group.
DEV void extend_group(SplitCursor& p, const BatchMetadata& rows) {
    p.count = 1;
    while (p.count < p.tokens_per_group && p.row + p.count < rows.rows &&
           follows_previous_row(rows, p.row + p.count, p.split_log2))
        ++p.count;
    p.context += p.count - 1;
    split_row(p, rows);
}

// Returns how many of the keys [at, end) row i of the group at `p` attends to: all keys except those of later
// tokens.
DEV u32 keys_seen_by(const SplitCursor& p, u32 i, u32 at, u32 end) {
    const u32 own = p.context + 1 + i - p.count, seen = own < end ? own : end;
    return seen > at ? seen - at : 0;
}

DEV u32 first_key(const SplitCursor& p) { return origin_of(p) + p.split * p.span; }
DEV u32 end_key(const SplitCursor& p) {
    const u32 end = first_key(p) + p.span;
    return end < p.context ? end : p.context;
}

DEV void next_split(SplitCursor& p, const BatchMetadata& rows) {
    if (--p.left == 0 || ++p.split < p.splits) return;
    p.split = 0;
    if (++p.head < rows.kv_heads) return;
    p.head = 0;
    p.record += p.count * p.splits;
    p.row += p.count;
    p.context = (u32)load_scalar(rows.context_lens + p.row);
    p.table = table_of(rows, p.row);
    p.token = (u32)load_scalar(rows.cu_q + p.row);
    p.position = position_of(rows, p.token);
    extend_group(p, rows);
}

// Result of count_splits(). Each thread counts the splits of some rows: `before` is the number of splits of
// the rows before these rows, `all` the number of splits of all rows.
struct SplitCount { u32 before, all; };
// Counts splits. Rows that are processed together (groups of at most `tokens_per_group` rows) count once;
// this thread counts rows [first, end). Every thread of the block's team must call it. `sums` [WARPS]:
// scratch shared memory, which no thread may still be reading.
DEV SplitCount count_splits(const BatchMetadata& rows, u32 first, u32 end, u32 tokens_per_group, u32 split_log2,
                            u32* sums) {
    u32 mine = 0;
    for (u32 row = first; row < end; ++row)
        if (is_group_leader(rows, row, tokens_per_group, split_log2)) mine += row_splits(rows, (u32)rows.context_lens[row], split_log2);
    u32 before = mine;
    for (u32 reach = 1; reach < WARP_SIZE; reach *= 2) {
        const u32 below = shfl(before, lane() - reach);
        if (lane() >= reach) before += below;
    }
    if (lane() == WARP_SIZE - 1) sums[warp_id()] = before;
    team_sync();
    u32 all = 0;
    for (u32 i = 0; i < WARPS; ++i) {
        if (i < warp_id()) before += sums[i];
        all += sums[i];
    }
    return SplitCount{before - mine, uniform(all)};
}

// Returns the first split of this block in the list of all splits. Every thread of the block's team must call
// it.
DEV SplitCursor start_of_block(const BatchMetadata& rows, u32 split_log2 = 0) {
    SHARED(u32, sums, 2 * WARPS);
    SHARED(u32, found, 7);
    const u32 each = (rows.rows + TEAM - 1) / TEAM;
    const u32 first = tid() * each, end = first + each < rows.rows ? first + each : rows.rows;
    // The block table index, token and position of the first row of this thread are loaded together with the
    // context lengths: loads that depend on each other would dominate the latency of a step with a single
    // row.
    const u32 table = first < end ? table_of(rows, first) : 0, token = first < end ? (u32)rows.cu_q[first] : 0;
    const u32 position = first < end ? position_of(rows, token) : 0;
    SplitCount splits = count_splits(rows, first, end, 1, split_log2, sums);
    u32 record = splits.before;
    const bool separate = rows.tokens_per_group <= 1 || splits.all * rows.kv_heads <= MAX_SEPARATE_SPLITS * gdim_x();
    const u32 tokens_per_group = separate ? 1 : rows.tokens_per_group;
    if (!separate) splits = count_splits(rows, first, end, tokens_per_group, split_log2, sums + WARPS);

    const u32 all = splits.all * rows.kv_heads, even = all / gdim_x(), remainder = all % gdim_x();
    const u32 begin = bid_x() * even + (bid_x() < remainder ? bid_x() : remainder);
    u32 before = splits.before;
    for (u32 row = first; row < end; ++row) {
        const u32 from = before * rows.kv_heads, context = (u32)rows.context_lens[row],
                  splits_here = row_splits(rows, context, split_log2);
        const u32 first_record = record;
        record += splits_here;
        if (!is_group_leader(rows, row, tokens_per_group, split_log2)) continue;
        before += splits_here;
        if (begin < from || begin >= before * rows.kv_heads) continue;
        found[0] = row;
        found[1] = begin - from;
        found[2] = context;
        found[3] = row == first ? table : table_of(rows, row);
        found[4] = row == first ? token : (u32)rows.cu_q[row];
        found[5] = row == first ? position : position_of(rows, found[4]);
        found[6] = first_record;
    }
    team_sync();
    SplitCursor p{};
    p.tokens_per_group = tokens_per_group;
    p.split_log2 = split_log2;
    p.left = even + (bid_x() < remainder ? 1 : 0);
    if (p.left == 0) return p;
    p.row = uniform(found[0]);
    p.context = uniform(found[2]);
    p.table = uniform(found[3]);
    p.token = uniform(found[4]);
    p.position = uniform(found[5]);
    p.record = uniform(found[6]);
    extend_group(p, rows);
    p.head = uniform(found[1] / p.splits);
    p.split = uniform(found[1] % p.splits);
    return p;
}
