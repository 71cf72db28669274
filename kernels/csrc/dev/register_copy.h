// dev/register_copy.h - copies of 16-byte vectors from global to shared memory through registers. Warps of 64
// lanes use them, because AMD GPUs have no asynchronous copies with zero fill. All loads of a pipeline step
// are issued before the first vector is stored.
#pragma once

#if DEV_AMD
DEV u32x4 load_piece(const void* p) { return bits_as<u32x4>(*(const DevWords<16>::type*)p); }
DEV void store_piece(void* p, const u32x4& v) { *(DevWords<16>::type*)p = __builtin_bit_cast(DevWords<16>::type, v); }
// Returns v. The compiler cannot move uses of the result, or the wait for the load of v, to a point before
// this call.
DEV u32 pinned(u32 v) {
    asm volatile("" : "+v"(v));
    return v;
}
// Also keeps the vector in successive registers; otherwise the compiler may compose it of parts that it has computed earlier.
DEV u32x4 pinned(const u32x4& vector) {
    auto v = __builtin_bit_cast(DevWords<16>::type, vector);
    asm volatile("" : "+v"(v));
    return bits_as<u32x4>(v);
}
// Prevents the compiler from reordering loads across this call, so that a wait for the loads before the call
// can leave the loads after it in flight.
DEV void keep_load_order() { asm volatile("" ::: "memory"); }
#else
DEV u32 pinned(u32 v) { return v; }
DEV u32x4 pinned(const u32x4& v) { return v; }
DEV void keep_load_order() {}
DEV u32x4 load_piece(const void* p) { return *(const u32x4*)p; }
DEV void store_piece(void* p, const u32x4& v) { *(u32x4*)p = v; }
#endif

// Stores a loaded 16-byte vector to shared memory, or zeros if `present` is false. There is no branch,
// because on AMD GPUs a branch would wait for all loads in flight.
DEV void store_loaded(void* p, const u32x4& piece, bool present) {
    const u32 mask = 0u - (u32)present;
    u32x4 v;
    UNROLL for (u32 e = 0; e < 4; ++e) v.v[e] = pinned(piece.v[e]) & mask;
    store_piece(p, v);
}

// Calls use(i, load(i)) for i from 0 to count - 1, in this order. Warps of 64 lanes have the loads of AHEAD values in
// flight at every wait of the loop: each value that has been used is replaced by a later one. load(i) must be valid for
// every i, and have no branch.
template <u32 AHEAD, class Load, class Use> DEV void each_ahead(u32 count, const Load& load, const Use& use) {
#if WARP_SIZE == 64
    decltype(load(0)) ahead[AHEAD];
    UNROLL for (u32 j = 0; j < AHEAD; ++j) {
        ahead[j] = load(j);
        keep_load_order();
    }
    u32 i = 0;
    for (; i + AHEAD < count; i += AHEAD)
        UNROLL for (u32 j = 0; j < AHEAD; ++j) {
            use(i + j, ahead[j]);
            ahead[j] = load(i + j + AHEAD);
            keep_load_order();
        }
    UNROLL for (u32 j = 0; j < AHEAD; ++j)
        if (i + j < count) use(i + j, ahead[j]);
#else
    for (u32 i = 0; i < count; ++i) use(i, load(i));
#endif
}
