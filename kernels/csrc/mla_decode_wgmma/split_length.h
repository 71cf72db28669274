// mla_decode_wgmma/split_length.h - chooses the maximum number of keys per split of a step, and whether
// successive tokens of a request are processed together, to minimise the time of the block with the most
// work. Each warp estimates the cost of one candidate length from the context lengths of all rows and from
// measured costs of a step (KEYS keys) and of storing the result of a split; the cheapest length is used, and
// all blocks get the same result. Therefore the splits of a context depend on the other rows of the step.
#pragma once

enum : u32 { SHORTEST = 8, LENGTHS = WARPS, WHOLE = 30 };  // candidates: log2 of the keys per split
DEV u32 split_length_log2(u32 i) { return i + 1 == LENGTHS ? WHOLE : SHORTEST + i; }

// Statistics over all rows for one candidate split length: numbers of splits, of rows, and of steps (KEYS
// keys each) of the splits.
struct SplitTotals {
    u32 all, records;    // number of splits of rows with keys; of all rows
    u32 longest, steps;  // number of steps of the longest split; of all splits
    u32 most;            // maximum number of splits of a row
    u32 rows_with_keys, chains;  // number of rows with keys; of chains of successive tokens of a request
    u32 end;             // index after the last row with keys
};
// The packed context of a row is its context length, with the highest bit (CHAIN_START) set unless the row is
// the token after that of the previous row in the same request.
enum : u32 { CHAIN_START = 1u << 31, CACHED_ROWS = OPERAND_BYTES / 4 };
DEV u32 pack_context(const BatchMetadata& rows, u32 row) {
    const u32 context = (u32)rows.context_lens[row];
    if (rows.tokens_per_group <= 1 || row == 0 || context <= 1) return context | CHAIN_START;
    const bool follows_previous_row =
        (u32)rows.context_lens[row - 1] + 1 == context && table_of(rows, row - 1) == table_of(rows, row);
    return follows_previous_row ? context : context | CHAIN_START;
}
// Writes the packed contexts of the first CACHED_ROWS rows to shared memory. The loads of all rows overlap,
// so that they take the time of one memory access. The function also reads table_rows and cu_q, so that
// start_of_block() finds them in the cache.
DEV void cache_contexts(const BatchMetadata& rows, u32* packed_contexts) {
    const u32 end = rows.rows < CACHED_ROWS ? rows.rows : CACHED_ROWS;
    _Pragma("unroll 1") for (u32 row = tid(); row < end; row += TEAM) {
        packed_contexts[row] = pack_context(rows, row);
        opaque(table_of(rows, row) ^ (u32)rows.cu_q[row]);
    }
    team_sync();
}

// Returns a / b rounded up, approximately; accurate enough for b up to some thousands.
DEV u32 approx_div_ceil(u32 a, u32 b) { return (u32)((float)a * rcp_((float)b) + 0.9999f); }
DEV SplitTotals total_splits(const BatchMetadata& rows, const u32* packed_contexts, u32 split_log2) {
    SplitTotals n{};
    _Pragma("unroll 1") for (u32 row = lane(); row < rows.rows; row += WARP_SIZE) {
        const u32 packed_context = row < CACHED_ROWS ? packed_contexts[row] : pack_context(rows, row),
                  context = packed_context & ~CHAIN_START;
        const u32 own = splits_of(context, split_log2);
        n.records += own;
        if (context == 0) continue;
        n.all += own;
        const u32 steps = approx_div_ceil(context, own * KEYS);
        n.longest = n.longest < steps ? steps : n.longest;
        n.steps += (context + KEYS - 1) / KEYS;
        n.most = n.most < own ? own : n.most;
        n.rows_with_keys += 1;
        n.chains += packed_context >> 31;
        n.end = row + 1;
    }
    return SplitTotals{warp_sum(n.all),  warp_sum(n.records), warp_max(n.longest), warp_sum(n.steps),
                  warp_max(n.most), warp_sum(n.rows_with_keys),    warp_sum(n.chains),  warp_max(n.end)};
}

// Returns the estimated number of splits if up to `tokens_per_group` tokens are processed together.
DEV u32 estimated_splits(const SplitTotals& n, u32 tokens_per_group) {
    if (tokens_per_group <= 1 || n.chains == 0) return n.all;
    const u32 length = approx_div_ceil(n.rows_with_keys, n.chains), runs = n.chains * approx_div_ceil(length, tokens_per_group);
    return (u32)((float)n.all * (float)runs * rcp_((float)n.rows_with_keys) + 0.99f);
}
// Returns the estimated time of the block with the most work, in eighths of the time of a step (KEYS keys).
// `filled`: number of query rows in use. Storing the result of a split costs up to 5 steps, or up to 2 if the
// context has one split; merging a split costs up to 1.5 steps. The estimate takes into account that not all
// splits of a block have the maximum length.
DEV u32 cost_of(const SplitTotals& n, u32 splits, u32 filled) {
    if (n.all == 0) return 0;
    const float part = (float)filled / TILE, rounds = (float)approx_div_ceil(splits, gdim_x());
    const float mean = (float)n.steps * rcp_((float)n.all), beyond = (float)n.longest - mean;
    const float steps = rounds * mean + (0.25f + 0.75f * rounds) * beyond;
    const float storing = n.most > 1 ? 1.f + 4.f * part : 1.f + part, merging = n.most > 1 ? 1.5f * part * (float)n.most : 0.f;
    return (u32)(8.f * (steps + rounds * storing + merging));
}

// Returns the base-2 logarithm of the maximum number of keys per split. Removes trailing rows without keys
// from `rows`, and sets its tokens_per_group to 1 if tokens are to be scheduled separately. `heads`: number
// of heads of a block; `packed_contexts`: OPERAND_BYTES of shared memory, not used afterwards. Every thread
// of the team must call it.
DEV u32 choose_split_length(BatchMetadata& rows, u32 heads, u32 most_records, u32* packed_contexts) {
    SHARED(u32, costs, 2 * LENGTHS);
    const u32 none = ~0u >> 4, own = warp_id();
    cache_contexts(rows, packed_contexts);
    const SplitTotals n = total_splits(rows, packed_contexts, split_length_log2(own));
    if (lane() < 2) {
        const u32 tokens_per_group = lane() == 0 ? rows.tokens_per_group : 1, kind = lane() * LENGTHS + LENGTHS - 1 - own;
        const bool fits = (n.records <= most_records || own + 1 == LENGTHS) && (lane() == 0 || rows.tokens_per_group > 1);
        const u32 cost = cost_of(n, estimated_splits(n, tokens_per_group), heads * (tokens_per_group < 1 ? 1 : tokens_per_group));
        costs[kind] = (fits && cost < none ? cost : none) << 4 | kind;
    }
    team_sync();
    const u32 best = warp_min(lane() < 2 * LENGTHS ? costs[lane()] : ~0u) & 15;
    rows.rows = n.end;
    if (best >= LENGTHS) rows.tokens_per_group = 1;
    return split_length_log2(LENGTHS - 1 - best % LENGTHS);
}
