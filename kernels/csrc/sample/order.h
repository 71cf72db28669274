// order.h - the total order of the ids of a logits row: larger value first, lower id first among equal
// values. Argmax, ranks, cutoffs and top-k lists all use it, so that they are consistent. CPU reference:
// cpu/sample.rs.
#pragma once

// IN_REGISTERS is put before loops over arrays that must stay in registers, if the loops are too long for
// automatic unrolling.
#if DEV_EMU
#  define IN_REGISTERS
#else
#  define IN_REGISTERS _Pragma("unroll")
#endif

// Maps a float to an unsigned integer so that larger floats have larger integers. -0 and +0 have equal
// integers.
DEV u32 order_of(float x) {
    const u32 bits = as_u32(x == 0.f ? 0.f : x);  // -0 and +0 are equal.
    return bits ^ ((bits >> 31) ? 0xffffffffu : 0x80000000u);
}
DEV float value_of(u32 order) { return as_f32(order ^ ((order >> 31) ? 0x80000000u : 0xffffffffu)); }

// Returns the sort key of an id: ids with a larger sort key come first.
DEV u64 sort_key_of(float value, u32 id) { return (u64)order_of(value) << 32 | (0xffffffffu - id); }
DEV u32 id_of(u64 sort_key) { return 0xffffffffu - (u32)sort_key; }
DEV float value_of(u64 sort_key) { return value_of((u32)(sort_key >> 32)); }

// Lower bound of the sort keys of unmasked ids: the sort key of the smallest finite float.
#define MIN_UNMASKED_KEY ((u64)0x00800000u << 32)
// Used instead of a sort key if a row contains a NaN or an infinity; no id has this sort key.
#define NON_FINITE_KEY (~(u64)0)

// Returns the largest sort key over the warp. Every lane of the warp must call it.
DEV u64 warp_max_key(u64 sort_key) {
    // Uses shuffles: with the single-instruction warp reduction sample_scan needs four registers too many on
    // sm_90a.
    const u32 high = group_max<WARP_SIZE>((u32)(sort_key >> 32));
    const u32 low = group_max<WARP_SIZE>((u32)(sort_key >> 32) == high ? (u32)sort_key : 0u);
    return (u64)high << 32 | low;
}

// Returns the largest sort key over the block, to all threads. Every thread of the block must call it.
DEV u64 block_max_key(u64 sort_key) {
    SHARED(u64, parts, 32);
    sort_key = warp_max_key(sort_key);
    if (lane() == 0) parts[warp_id()] = sort_key;
    sync();
    u64 first = parts[0];
    for (u32 i = 1; i < bdim() / WARP_SIZE; ++i) first = parts[i] > first ? parts[i] : first;
    sync();
    return first;
}

struct PrefixSum {
    u32 before, total;
};
// Exclusive prefix sum over the block's threads, and the total. Every thread of the block must call it.
DEV PrefixSum block_prefix(u32 v) {
    SHARED(u32, sums, 32);
    u32 upto = v;
    for (u32 d = 1; d < WARP_SIZE; d *= 2) {
        const u32 other = shfl(upto, lane() - d);
        if (lane() >= d) upto += other;
    }
    if (lane() == WARP_SIZE - 1) sums[warp_id()] = upto;
    sync();
    PrefixSum p = {upto - v, 0};
    for (u32 i = 0; i < bdim() / WARP_SIZE; ++i) {
        if (i < warp_id()) p.before += sums[i];
        p.total += sums[i];
    }
    sync();
    return p;
}
