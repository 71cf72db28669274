// order.h - the one order of a row of logits: larger value first, lower id first among equals. Argmax, ranks, cuts and
// lists all follow it (CPU twin: cpu/sample.rs), so they agree with each other.
#pragma once

// Before loops over values in registers whose bodies are too long for the compiler to unroll them unasked.
#if DEV_EMU
#  define IN_REGISTERS
#else
#  define IN_REGISTERS _Pragma("unroll")
#endif

// Orders floats as unsigned numbers; any bits have their place.
DEV u32 order_of(float x) {
    const u32 bits = as_u32(x == 0.f ? 0.f : x);  // -0 and +0 are equals.
    return bits ^ ((bits >> 31) ? 0xffffffffu : 0x80000000u);
}
DEV float value_of(u32 order) { return as_f32(order ^ ((order >> 31) ? 0x80000000u : 0xffffffffu)); }

// Where an id stands: the larger number comes first.
DEV u64 place_of(float value, u32 id) { return (u64)order_of(value) << 32 | (0xffffffffu - id); }
DEV u32 id_of(u64 place) { return 0xffffffffu - (u32)place; }
DEV float value_of(u64 place) { return value_of((u32)(place >> 32)); }

// First place of all unmasked ids: the smallest finite value.
#define LAST_UNMASKED ((u64)0x00800000u << 32)
// No id's place: marks a row that holds a NaN or an infinity.
#define STRANGE (~(u64)0)

// Every lane of the warp must come.
DEV u64 warp_first(u64 place) {
    // By shuffles: with one instruction for the warp sample_scan lacks four registers on sm_90a.
    const u32 high = group_max<WARP_SIZE>((u32)(place >> 32));
    const u32 low = group_max<WARP_SIZE>((u32)(place >> 32) == high ? (u32)place : 0u);
    return (u64)high << 32 | low;
}

// Every thread of the block must come; the first place of all, for all.
DEV u64 block_first(u64 place) {
    SHARED(u64, parts, 32);
    place = warp_first(place);
    if (lane() == 0) parts[warp_id()] = place;
    sync();
    u64 first = parts[0];
    for (u32 i = 1; i < bdim() / WARP_SIZE; ++i) first = parts[i] > first ? parts[i] : first;
    sync();
    return first;
}

struct Prefix {
    u32 before, total;
};
// Sum of the values of lower threads, and of all. Every thread of the block must come.
DEV Prefix block_prefix(u32 v) {
    SHARED(u32, sums, 32);
    u32 upto = v;
    for (u32 d = 1; d < WARP_SIZE; d *= 2) {
        const u32 other = shfl(upto, lane() - d);
        if (lane() >= d) upto += other;
    }
    if (lane() == WARP_SIZE - 1) sums[warp_id()] = upto;
    sync();
    Prefix p = {upto - v, 0};
    for (u32 i = 0; i < bdim() / WARP_SIZE; ++i) {
        if (i < warp_id()) p.before += sums[i];
        p.total += sums[i];
    }
    sync();
    return p;
}
