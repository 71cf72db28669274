// dev/register_copy.h - copies of 16-byte pieces from global to shared memory through registers. Warps of 64
// lanes use them, because AMD GPUs have no asynchronous copies with zero fill. All loads of a step are issued
// before the first piece is stored.
#pragma once

#if DEV_AMD
DEV u32x4 load_piece(const void* p) { return bits_as<u32x4>(*(const DevWords<16>::type*)p); }
DEV void store_piece(void* p, const u32x4& v) { *(DevWords<16>::type*)p = __builtin_bit_cast(DevWords<16>::type, v); }
// Returns v. The compiler moves neither uses of the result nor the wait for the load of v before this call.
DEV u32 pinned(u32 v) {
    asm volatile("" : "+v"(v));
    return v;
}
// Keeps the loads before this call ahead of the loads after it, so that a wait can leave the later ones in flight.
DEV void keep_load_order() { asm volatile("" ::: "memory"); }
#else
DEV u32 pinned(u32 v) { return v; }
DEV void keep_load_order() {}
DEV u32x4 load_piece(const void* p) { return *(const u32x4*)p; }
DEV void store_piece(void* p, const u32x4& v) { *(u32x4*)p = v; }
#endif

// Stores a loaded piece to shared memory, or zeros if `present` is false; without a branch, because a branch
// would wait for all loads in flight.
DEV void store_loaded(void* p, const u32x4& piece, bool present) {
    const u32 mask = 0u - (u32)present;
    u32x4 v;
    UNROLL for (u32 e = 0; e < 4; ++e) v.v[e] = pinned(piece.v[e]) & mask;
    store_piece(p, v);
}
