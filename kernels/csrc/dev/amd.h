// dev/amd.h - thread ids, barriers, shuffles, maths, atomics and memory access on AMD. dev.h documents these
// functions.
#pragma once

#define DEV static inline __attribute__((device, always_inline))
#define KERNEL(max_threads) extern "C" __attribute__((global, amdgpu_flat_work_group_size(1, max_threads))) void
#define EXPORT(name)
#define DEV_SITE  // parameter of collectives; only the emulator uses it
#define DEV_AT
#define SHARED(T, name, count) static __attribute__((shared)) T name[count]
#define DYN_SHARED(T, name)                                      \
    extern __attribute__((shared, aligned(16))) u8 dev_dynamic[]; \
    T* name = (T*)dev_dynamic
#if defined(__GFX9__) || defined(__GFX8__)
#  define WARP_SIZE 64
#else
#  define WARP_SIZE 32
#endif

DEV u32 tid() { return __builtin_amdgcn_workitem_id_x(); }
DEV u32 bdim() { return __builtin_amdgcn_workgroup_size_x(); }
DEV u32 lane() { return __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u)); }
// warp_id() is the same on all lanes of a wavefront. With readfirstlane the compiler keeps addresses that are
// derived from it in scalar registers (SGPRs).
DEV u32 warp_id() { return (u32)__builtin_amdgcn_readfirstlane((int)(tid() / WARP_SIZE)); }
DEV u32 bid_x() { return __builtin_amdgcn_workgroup_id_x(); }
DEV u32 bid_y() { return __builtin_amdgcn_workgroup_id_y(); }
DEV u32 bid_z() { return __builtin_amdgcn_workgroup_id_z(); }
DEV u32 gdim_x() { return __builtin_amdgcn_grid_size_x() / __builtin_amdgcn_workgroup_size_x(); }
DEV u32 gdim_y() { return __builtin_amdgcn_grid_size_y() / __builtin_amdgcn_workgroup_size_y(); }
DEV u32 gdim_z() { return __builtin_amdgcn_grid_size_z() / __builtin_amdgcn_workgroup_size_z(); }

DEV void wait_shared() {
#if defined(__GFX9__)
    __builtin_amdgcn_s_waitcnt(0xc07f);  // lgkmcnt(0)
#endif
}
DEV void sync() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
#if __clang_major__ != 22
    wait_shared();  // gate.py checks the waits of clang 22 only: see lds_waits.py
#endif
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
DEV void warp_sync() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}
DEV u32 shfl_u32(u32 v, u32 from) { return (u32)__builtin_amdgcn_ds_bpermute((int)(from << 2), (int)v); }
#if WARP_SIZE == 64
DEV u64 warp_ballot(bool p) { return __builtin_amdgcn_uicmp((u32)p, 0u, 33 /* not equal */); }
#else
DEV u64 warp_ballot(bool p) { return (u64)__builtin_amdgcn_ballot_w32(p); }
#endif

// Returns the value v of lane `lane() ^ MASK`, as one step of a butterfly reduction. All lanes of each
// aligned group of MASK lanes must already have equal v. Then a DPP mirror, which uses no LDS, returns the
// same value as an exchange with lane `lane() ^ MASK`, although it reads another lane of that group.
template <u32 MASK> DEV u32 butterfly_u32(u32 v) {
    const int s = (int)v;
    if constexpr (MASK == 1) return (u32)__builtin_amdgcn_mov_dpp(s, 0xb1 /* quad 1,0,3,2 */, 15, 15, true);
    if constexpr (MASK == 2) return (u32)__builtin_amdgcn_mov_dpp(s, 0x4e /* quad 2,3,0,1 */, 15, 15, true);
    if constexpr (MASK == 4) return (u32)__builtin_amdgcn_mov_dpp(s, 0x141 /* mirror of 8 */, 15, 15, true);
    if constexpr (MASK == 8) return (u32)__builtin_amdgcn_mov_dpp(s, 0x140 /* mirror of 16 */, 15, 15, true);
    if constexpr (MASK == 16) return (u32)__builtin_amdgcn_ds_swizzle(s, 0x401f /* lane ^ 16 */);
    return shfl_u32(v, lane() ^ MASK);
}

DEV float as_f32(u32 v) { return __builtin_bit_cast(float, v); }
DEV u32 as_u32(float v) { return __builtin_bit_cast(u32, v); }
#if __has_builtin(__builtin_amdgcn_exp2f)
DEV float exp2_(float x) { return __builtin_amdgcn_exp2f(x); }
DEV float log2_(float x) { return __builtin_amdgcn_logf(x); }
#else  // clang 15, the compiler of hiprtc 5, lacks these builtins
DEV float exp2_(float x) { return __builtin_exp2f(x); }
DEV float log2_(float x) { return __builtin_log2f(x); }
#endif
DEV float sqrt_(float x) { return __builtin_amdgcn_sqrtf(x); }
DEV float rsqrt_(float x) { return __builtin_amdgcn_rsqf(x); }
DEV float rcp_(float x) { return __builtin_amdgcn_rcpf(x); }
DEV float fma_(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
DEV float fmax_(float a, float b) { return __builtin_fmaxf(a, b); }
DEV float fmin_(float a, float b) { return __builtin_fminf(a, b); }
DEV float fabs_(float a) { return __builtin_fabsf(a); }
DEV u16 f16_bits(float x) { return __builtin_bit_cast(u16, (_Float16)x); }
DEV float f16_value(u16 bits) { return (float)__builtin_bit_cast(_Float16, bits); }
DEV u16 bf16_bits(float f) {
#if __clang_major__ >= 18
    return __builtin_bit_cast(u16, (__bf16)f);  // one instruction on gfx950
#else
    const u32 u = as_u32(f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (u16)(u >> 16 | 64);
    return (u16)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
#endif
}

#define DEV_AGENT __HIP_MEMORY_SCOPE_AGENT
DEV u32 atomic_add(u32* p, u32 v) { return __hip_atomic_fetch_add(p, v, __ATOMIC_RELAXED, DEV_AGENT); }
DEV float atomic_add(float* p, float v) { return __hip_atomic_fetch_add(p, v, __ATOMIC_RELAXED, DEV_AGENT); }
DEV u32 atomic_max(u32* p, u32 v) { return __hip_atomic_fetch_max(p, v, __ATOMIC_RELAXED, DEV_AGENT); }
DEV u32 atomic_cas(u32* p, u32 expected, u32 wanted) {
    __hip_atomic_compare_exchange_strong(p, &expected, wanted, __ATOMIC_RELAXED, __ATOMIC_RELAXED, DEV_AGENT);
    return expected;
}
DEV u32 atomic_add_acq_rel(u32* p, u32 v) { return __hip_atomic_fetch_add(p, v, __ATOMIC_ACQ_REL, DEV_AGENT); }
DEV u32 load_acquire(const u32* p) { return __hip_atomic_load((u32*)p, __ATOMIC_ACQUIRE, DEV_AGENT); }
DEV void store_release(u32* p, u32 v) { __hip_atomic_store(p, v, __ATOMIC_RELEASE, DEV_AGENT); }
DEV void fence() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "agent"); }
DEV void pause() { __builtin_amdgcn_s_sleep(1); }

template <u32 BYTES> struct DevWords;
template <> struct DevWords<4> { typedef u32 type; };
template <> struct DevWords<8> { typedef u32 type __attribute__((ext_vector_type(2))); };
template <> struct DevWords<16> { typedef u32 type __attribute__((ext_vector_type(4))); };
template <class V> DEV V load_const(const V* p) { return *p; }
template <class V> DEV V load_stream(const V* p) {
    typedef typename DevWords<sizeof(V)>::type Words;
    return __builtin_bit_cast(V, __builtin_nontemporal_load((const Words*)p));
}
template <class V> DEV void store_stream(V* p, const V& v) {
    typedef typename DevWords<sizeof(V)>::type Words;
    __builtin_nontemporal_store(__builtin_bit_cast(Words, v), (Words*)p);
}
DEV void cp_async4(void* shared, const void* global) { *(u32*)shared = *(const u32*)global; }
DEV void cp_async16(void* shared, const void* global) {
    *(DevWords<16>::type*)shared = *(const DevWords<16>::type*)global;
}
DEV void cp_async16_zfill(void* shared, const void* global, bool present) {
    DevWords<16>::type v = {0, 0, 0, 0};
    if (present) v = *(const DevWords<16>::type*)global;
    *(DevWords<16>::type*)shared = v;
}
DEV void cp_async_commit() {}
template <u32 N> DEV void cp_async_wait() {}
DEV void grid_wait() {}
DEV void grid_launch_dependents() {}
