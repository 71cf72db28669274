// dev/nvidia.h - thread ids, barriers, shuffles, maths, atomics and memory access on NVIDIA. dev.h documents
// these functions.
#pragma once

#define DEV static __device__ __forceinline__
#define KERNEL(max_threads) extern "C" __global__ __launch_bounds__(max_threads) void
#define EXPORT(name)
#define DEV_SITE  // parameter of collectives; only the emulator uses it
#define DEV_AT
#define SHARED(T, name, count) __shared__ T name[count]
#define DYN_SHARED(T, name)                          \
    extern __shared__ __align__(128) u8 dev_dynamic[]; \
    T* name = (T*)dev_dynamic
#define WARP_SIZE 32

DEV u32 tid() { return threadIdx.x; }
DEV u32 bdim() { return blockDim.x; }
DEV u32 lane() { return threadIdx.x & 31u; }
DEV u32 warp_id() { return threadIdx.x / 32u; }
DEV u32 bid_x() { return blockIdx.x; }
DEV u32 bid_y() { return blockIdx.y; }
DEV u32 bid_z() { return blockIdx.z; }
DEV u32 gdim_x() { return gridDim.x; }
DEV u32 gdim_y() { return gridDim.y; }
DEV u32 gdim_z() { return gridDim.z; }

DEV void sync() { __syncthreads(); }
DEV void wait_shared() {}
DEV void warp_sync() { __syncwarp(); }
DEV u32 shfl_u32(u32 v, u32 from) { return __shfl_sync(0xffffffffu, v, (int)from); }
DEV u64 warp_ballot(bool p) { return __ballot_sync(0xffffffffu, p); }
template <u32 MASK> DEV u32 butterfly_u32(u32 v) { return __shfl_xor_sync(0xffffffffu, v, (int)MASK); }

DEV float as_f32(u32 v) { return __uint_as_float(v); }
DEV u32 as_u32(float v) { return __float_as_uint(v); }
DEV float exp2_(float x) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
DEV float log2_(float x) { float r; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
DEV float sqrt_(float x) { float r; asm("sqrt.approx.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
DEV float rsqrt_(float x) { float r; asm("rsqrt.approx.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
DEV float rcp_(float x) { float r; asm("rcp.approx.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
DEV float fma_(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEV float fmax_(float a, float b) { return fmaxf(a, b); }
DEV float fmin_(float a, float b) { return fminf(a, b); }
DEV float fabs_(float a) { return fabsf(a); }
DEV u16 f16_bits(float x) { u16 r; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(x)); return r; }
DEV float f16_value(u16 bits) { float r; asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(bits)); return r; }
DEV u16 bf16_bits(float f) { u16 r; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(f)); return r; }

DEV u32 atomic_add(u32* p, u32 v) { return atomicAdd(p, v); }
DEV float atomic_add(float* p, float v) { return atomicAdd(p, v); }
DEV u32 atomic_max(u32* p, u32 v) { return atomicMax(p, v); }
DEV u32 atomic_cas(u32* p, u32 expected, u32 wanted) { return atomicCAS(p, expected, wanted); }
DEV u32 atomic_add_acq_rel(u32* p, u32 v) {
    u32 r; asm volatile("atom.acq_rel.gpu.add.u32 %0, [%1], %2;" : "=r"(r) : "l"(p), "r"(v) : "memory"); return r;
}
DEV u32 load_acquire(const u32* p) {
    u32 r; asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(r) : "l"(p) : "memory"); return r;
}
DEV void store_release(u32* p, u32 v) { asm volatile("st.release.gpu.u32 [%0], %1;" : : "l"(p), "r"(v) : "memory"); }
DEV void fence() { __threadfence(); }
DEV void pause() { __nanosleep(20); }

// The asm statements are volatile, because the compiler could otherwise hoist a load above grid_wait().
template <u32 BYTES> struct DevLoad;
template <> struct DevLoad<4> {
    DEV void constant(u32* v, const void* p) { asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v[0]) : "l"(p)); }
    DEV void stream(u32* v, const void* p) { asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v[0]) : "l"(p)); }
    DEV void store(void* p, const u32* v) { asm volatile("st.global.cs.u32 [%0], %1;" : : "l"(p), "r"(v[0]) : "memory"); }
};
template <> struct DevLoad<8> {
    DEV void constant(u32* v, const void* p) {
        asm volatile("ld.global.nc.v2.u32 {%0,%1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "l"(p));
    }
    DEV void stream(u32* v, const void* p) {
        asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "l"(p));
    }
    DEV void store(void* p, const u32* v) {
        asm volatile("st.global.cs.v2.u32 [%0], {%1,%2};" : : "l"(p), "r"(v[0]), "r"(v[1]) : "memory");
    }
};
template <> struct DevLoad<16> {
    DEV void constant(u32* v, const void* p) {
        asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "l"(p));
    }
    DEV void stream(u32* v, const void* p) {
        asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "l"(p));
    }
    DEV void store(void* p, const u32* v) {
        asm volatile("st.global.cs.v4.u32 [%0], {%1,%2,%3,%4};"
                     : : "l"(p), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
    }
};
template <u32 N> struct DevWords { u32 v[N]; };
template <class V> DEV V load_const(const V* p) {
    DevWords<sizeof(V) / 4> words; DevLoad<sizeof(V)>::constant(words.v, p);
    return __builtin_bit_cast(V, words);
}
template <class V> DEV V load_stream(const V* p) {
    DevWords<sizeof(V) / 4> words; DevLoad<sizeof(V)>::stream(words.v, p);
    return __builtin_bit_cast(V, words);
}
template <class V> DEV void store_stream(V* p, const V& v) {
    const DevWords<sizeof(V) / 4> words = __builtin_bit_cast(DevWords<sizeof(V) / 4>, v);
    DevLoad<sizeof(V)>::store(p, words.v);
}

// Returns an address within the shared state space, which PTX instructions require.
DEV u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEV void cp_async4(void* shared, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" : : "r"(shared_address(shared)), "l"(global) : "memory");
}
DEV void cp_async16(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"(shared_address(shared)), "l"(global) : "memory");
}
DEV void cp_async16_zfill(void* shared, const void* global, bool present) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 : : "r"(shared_address(shared)), "l"(global), "r"(present ? 16 : 0) : "memory");
}
DEV void cp_async_commit() { asm volatile("cp.async.commit_group;" : : : "memory"); }
template <u32 N> DEV void cp_async_wait() { asm volatile("cp.async.wait_group %0;" : : "n"(N) : "memory"); }

#if DEV_SM >= 900
DEV void grid_wait() { asm volatile("griddepcontrol.wait;" : : : "memory"); }
DEV void grid_launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" : : : "memory"); }
#else
DEV void grid_wait() {}
DEV void grid_launch_dependents() {}
#endif
