// dev/collective.h - shuffles of any type, and reductions over groups of lanes, warps and blocks.
// Reduction orders are fixed: a warp adds as a balanced tree over its lanes, a block adds its warps in
// ascending order.
#pragma once

DEV u32 shfl(u32 v, u32 from DEV_SITE) { return shfl_u32(v, from DEV_AT); }
DEV i32 shfl(i32 v, u32 from DEV_SITE) { return (i32)shfl_u32((u32)v, from DEV_AT); }
DEV float shfl(float v, u32 from DEV_SITE) { return as_f32(shfl_u32(as_u32(v), from DEV_AT)); }
DEV u64 shfl(u64 v, u32 from DEV_SITE) {
    const u32 high = shfl_u32((u32)(v >> 32), from DEV_AT);
    return (u64)high << 32 | shfl_u32((u32)v, from DEV_AT);
}
template <class T> DEV T shfl_xor(T v, u32 mask DEV_SITE) { return shfl(v, lane() ^ mask DEV_AT); }
DEV bool warp_any(bool p DEV_SITE) { return warp_ballot(p DEV_AT) != 0; }
DEV bool warp_all(bool p DEV_SITE) { return warp_ballot(!p DEV_AT) == 0; }

// Reduction operator: addition.
struct Sum {
    DEV float of(float a, float b) { return a + b; }
    DEV u32 of(u32 a, u32 b) { return a + b; }
};
// Reduction operator: maximum.
struct Max {
    DEV float of(float a, float b) { return fmax_(a, b); }
    DEV u32 of(u32 a, u32 b) { return a > b ? a : b; }
};
// Reduction operator: minimum.
struct Min {
    DEV u32 of(u32 a, u32 b) { return a < b ? a : b; }
};

#if DEV_EMU
// The emulator reduces in one warp collective instead of one per tree level; the order of additions is the
// same.
template <class Op, u32 GROUP, class T> DEV T group_reduce(T v DEV_SITE) { return emu::reduce<Op, GROUP>(v DEV_AT); }
#else
template <u32 MASK> DEV float butterfly(float v) { return as_f32(butterfly_u32<MASK>(as_u32(v))); }
template <u32 MASK> DEV u32 butterfly(u32 v) { return butterfly_u32<MASK>(v); }
template <class Op, u32 GROUP, class T> DEV T group_reduce(T v DEV_SITE) {
    if constexpr (GROUP >= 2) v = Op::of(v, butterfly<1>(v));
    if constexpr (GROUP >= 4) v = Op::of(v, butterfly<2>(v));
    if constexpr (GROUP >= 8) v = Op::of(v, butterfly<4>(v));
    if constexpr (GROUP >= 16) v = Op::of(v, butterfly<8>(v));
    if constexpr (GROUP >= 32) v = Op::of(v, butterfly<16>(v));
    if constexpr (GROUP >= 64) v = Op::of(v, butterfly<32>(v));
    return v;
}
#endif

// Sum or maximum over each aligned group of GROUP lanes (a power of two). Every lane of the warp must call
// it, and gets the result of its group.
template <u32 GROUP, class T> DEV T group_sum(T v DEV_SITE) { return group_reduce<Sum, GROUP>(v DEV_AT); }
template <u32 GROUP, class T> DEV T group_max(T v DEV_SITE) { return group_reduce<Max, GROUP>(v DEV_AT); }
template <class T> DEV T warp_sum(T v DEV_SITE) { return group_reduce<Sum, WARP_SIZE>(v DEV_AT); }
template <class T> DEV T warp_max(T v DEV_SITE) { return group_reduce<Max, WARP_SIZE>(v DEV_AT); }
template <class T> DEV T warp_min(T v DEV_SITE) { return group_reduce<Min, WARP_SIZE>(v DEV_AT); }
#if DEV_NV
// Single-instruction warp reductions (redux.sync).
DEV u32 warp_sum(u32 v) { return __reduce_add_sync(0xffffffffu, v); }
DEV u32 warp_max(u32 v) { return __reduce_max_sync(0xffffffffu, v); }
DEV u32 warp_min(u32 v) { return __reduce_min_sync(0xffffffffu, v); }
#endif

// Inclusive prefix sum over the lanes of a warp.
DEV u32 warp_inclusive_sum(u32 v) {
    for (u32 step = 1; step < WARP_SIZE; step *= 2) {
        const u32 other = shfl(v, lane() - step);
        if (lane() >= step) v += other;
    }
    return v;
}

// Reduces v over all threads of the block. Every thread must call it, and gets the result. The block size is
// a multiple of WARP_SIZE.
template <class Op, class T> DEV T block_reduce(T v DEV_SITE) {
    SHARED(T, parts, 32);
    v = group_reduce<Op, WARP_SIZE>(v DEV_AT);
    const u32 warps = bdim() / WARP_SIZE;
    if (warps == 1) return v;
    if (lane() == 0) parts[warp_id()] = v;
    sync();
    T r = parts[0];
    for (u32 i = 1; i < warps; ++i) r = Op::of(r, parts[i]);
    sync();  // The next reduction writes the same parts.
    return r;
}
template <class T> DEV T block_sum(T v DEV_SITE) { return block_reduce<Sum>(v DEV_AT); }
template <class T> DEV T block_max(T v DEV_SITE) { return block_reduce<Max>(v DEV_AT); }
