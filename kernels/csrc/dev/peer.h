// dev/peer.h - peer-to-peer memory: kernels of several GPUs write it while others read it.
//
//   load_peer(p) store_peer(p, v)  loads (stores) two words of 8 bytes; each word is atomic, and no access is
//                           ordered
//   fence_peers()                  system-scope fence: a GPU that reads a later write of this thread also
//                           sees all that this thread wrote or read before the fence
//   load_host(p)                   reads a word of host memory that the host may write at any time
//   peer_pause()                   inside a spin loop that waits for another GPU
#pragma once

struct alignas(16) u64x2 { u64 v[2]; };

#if DEV_NV
DEV u64x2 load_peer(const u64x2* p) {
    u64x2 r;
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0,%1}, [%2];" : "=l"(r.v[0]), "=l"(r.v[1]) : "l"(p) : "memory");
    return r;
}
DEV void store_peer(u64x2* p, const u64x2& x) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1,%2};" : : "l"(p), "l"(x.v[0]), "l"(x.v[1]) : "memory");
}
DEV u32 load_host(const u32* p) {
    u32 r;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(r) : "l"(p) : "memory");
    return r;
}
DEV void fence_peers() { __threadfence_system(); }
DEV void peer_pause() {}  // A poll of peer memory takes longer than the expected wait.
#elif DEV_AMD
DEV u64x2 load_peer(const u64x2* p) {
    u64x2 r;
    for (u32 i = 0; i < 2; ++i)
        r.v[i] = __hip_atomic_load((u64*)p + i, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
    return r;
}
DEV void store_peer(u64x2* p, const u64x2& x) {
    for (u32 i = 0; i < 2; ++i)
        __hip_atomic_store((u64*)p + i, x.v[i], __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
DEV u32 load_host(const u32* p) { return __hip_atomic_load((u32*)p, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM); }
DEV void fence_peers() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, ""); }
DEV void peer_pause() {}
#else
DEV u64x2 load_peer(const u64x2* p) {
    return {{__atomic_load_n(p->v, __ATOMIC_RELAXED), __atomic_load_n(p->v + 1, __ATOMIC_RELAXED)}};
}
DEV void store_peer(u64x2* p, const u64x2& x) {
    for (u32 i = 0; i < 2; ++i) __atomic_store_n(p->v + i, x.v[i], __ATOMIC_RELAXED);
}
DEV u32 load_host(const u32* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
DEV void fence_peers() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
// Reports progress to the emulator. Otherwise it would report a wait for another device, which may take any
// time, as a deadlock.
DEV void peer_pause() {
    emu::note_progress();
    emu::pause();
}
#endif
