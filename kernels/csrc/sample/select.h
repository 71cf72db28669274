// select.h - block-wide searches in a logits row: sums and counts of the ids above a limit, the k-th largest
// sort key, the k largest sort keys in order. Chunks are divided among the warps; chunks without a sort key
// above the limit are not read.
#pragma once
#include "sample/chunk.h"

enum : u32 {
    LIST = 1024,     // maximum number of sort keys sorted at once, and of top log-probabilities
    BIN_BITS = 11,
    BINS = 1u << BIN_BITS,
};

// Scratch memory, in shared memory, of a search for the largest sort keys of a logits row.
struct LogitsSearchScratch {
    u64 list[LIST], sorted[LIST];
    u32 bins[BINS];
    u32 order[MAX_CHUNKS];  // order_of(largest value) of each chunk of the searched row
    u32 found, bin, above;
    u64 sort_key;
};

// Calls f(sort_key, value) for every id of the row with sort key >= `limit`; each id is processed by one
// lane. Chunks without such ids are skipped. Lanes diverge, so f must not use shuffles or other warp
// collectives.
template <class F> DEV void each_from(const LogitsSearchScratch& search, const LogitsRowView& row, u64 limit, F f) {
    for (u32 c = warp_id(); c < chunks_of(row); c += bdim() / WARP_SIZE) {
        if (search.order[c] < (u32)(limit >> 32)) continue;
        for (u32 at = lane() * 4; at < CHUNK; at += WARP_SIZE * 4) {
            const u32 id = row.first + c * CHUNK + at;
            if (id >= row.end) break;
            const f32x4 four = values4(row, id);
            for (u32 i = 0; i < 4; ++i) {
                const u64 sort_key = sort_key_of(four.v[i], id + i);
                if (sort_key >= limit && id + i < row.end) f(sort_key, four.v[i]);
            }
        }
    }
}

// Returns the number of ids of the row with sort key >= `limit`. Every thread of the block must call it.
DEV u32 count_from(const LogitsSearchScratch& search, const LogitsRowView& row, u64 limit) {
    u32 n = 0;
    each_from(search, row, limit, [&](u64, float) { ++n; });
    return block_sum(n);
}

// Returns the sum of exp(value - best) over the ids with sort key >= `limit`. The values are added in a fixed
// order: per lane, then per warp, then over the block.
DEV float mass_from(const LogitsSearchScratch& search, const LogitsRowView& row, u64 limit, float best) {
    float mass = 0.f;
    each_from(search, row, limit, [&](u64, float value) { mass += exp_(value - best); });
    return block_sum(mass);
}

// Writes the first LIST sort keys found in [limit, end) to search.list, unordered; returns the number of all
// such sort keys, which may exceed LIST.
DEV u32 gather(LogitsSearchScratch& search, const LogitsRowView& row, u64 limit, u64 end) {
    if (tid() == 0) search.found = 0;
    sync();
    each_from(search, row, limit, [&](u64 sort_key, float) {
        if (sort_key >= end) return;
        const u32 slot = atomic_add(&search.found, 1u);
        if (slot < LIST) search.list[slot] = sort_key;
    });
    sync();
    const u32 found = search.found;
    sync();  // The next search resets the counter.
    return found;
}

// Sorts the first `n` <= LIST sort keys of search.list into search.sorted: the index of a sort key is the
// number of larger sort keys. All sort keys differ.
DEV void sort_list(LogitsSearchScratch& search, u32 n) {
    for (u32 i = tid(); i < n; i += bdim()) {
        const u64 sort_key = search.list[i];
        u32 before = 0;
        for (u32 j = 0; j < n; ++j) before += search.list[j] > sort_key;
        search.sorted[before] = sort_key;
    }
    sync();
}

// Returns a lower bound of the k-th largest sort key of the row: the k-th largest of the largest sort keys of
// the chunks.
DEV u64 kth_lower_bound(LogitsSearchScratch& search, u32 chunks, u32 k) {
    if (k > chunks) return MIN_UNMASKED_KEY;
    if (tid() < chunks) {
        const u32 own = search.order[tid()];
        u32 before = 0;
        for (u32 c = 0; c < chunks; ++c) before += search.order[c] > own || (search.order[c] == own && c < tid());
        if (before == k - 1) search.sort_key = (u64)own << 32;
    }
    sync();
    const u64 bound = search.sort_key;
    sync();
    return bound > MIN_UNMASKED_KEY ? bound : MIN_UNMASKED_KEY;
}

// Step of a radix select over the histogram of `search`: sets search.bin to the bin that contains the k-th
// largest entry, and search.above to the number of entries in higher bins. If there are fewer than k entries,
// search.bin is BINS.
DEV void find_bin(LogitsSearchScratch& search, u32 k) {
    const u32 each = BINS / PICK_THREADS, top = BINS - 1 - tid() * each;
    u32 own = 0;
    for (u32 i = 0; i < each; ++i) own += search.bins[top - i];
    if (tid() == 0) search.bin = BINS;
    const PrefixSum sums = block_prefix(own);
    u32 above = sums.before;
    if (above < k && k <= above + own) {
        u32 bin = top;
        while (above + search.bins[bin] < k) above += search.bins[bin--];
        search.bin = bin;
        search.above = above;
    }
    sync();
}

// Returns the k-th largest sort key, or 0 if fewer than k ids are unmasked; `bound` is a lower bound of that
// sort key. Up to LIST candidates are sorted; more are first reduced by radix select.
DEV u64 kth_sort_key(LogitsSearchScratch& search, const LogitsRowView& row, u32 k, u64 bound) {
    u32 n = gather(search, row, bound, NON_FINITE_KEY);
    u64 low = bound;
    if (n > LIST) {
        u32 shift = 64 - BIN_BITS, bits = BIN_BITS;
        u64 prefix = 0;
        for (;;) {
            for (u32 i = tid(); i < BINS; i += bdim()) search.bins[i] = 0;
            sync();
            const u32 above_shift = shift + bits;
            each_from(search, row, low > bound ? low : bound, [&](u64 sort_key, float) {
                if (above_shift < 64 && sort_key >> above_shift != prefix) return;
                atomic_add(&search.bins[(u32)(sort_key >> shift) & ((1u << bits) - 1)], 1u);
            });
            sync();
            find_bin(search, k);
            if (search.bin == BINS) return 0;
            prefix = prefix << bits | search.bin;
            k -= search.above;
            n = search.bins[search.bin];
            low = prefix << shift;
            sync();
            if (n <= LIST) break;
            bits = shift < BIN_BITS ? shift : BIN_BITS;
            shift -= bits;
        }
        gather(search, row, low > bound ? low : bound, low + ((u64)1 << shift));
    }
    if (n < k) return 0;
    sort_list(search, n);
    const u64 sort_key = search.sorted[k - 1];
    sync();
    return sort_key;
}
