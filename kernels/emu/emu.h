// emu.h - implements the macros and functions of kernels/csrc/dev.h, in which kernels are written, for the
// CPU. One fiber (user-space thread) runs per GPU thread. The lanes of a wave synchronise only at
// collectives, and the waves of a block only at barriers, as on hardware.
#pragma once
#include <cmath>
#include <cstring>
#include <utility>

#include "lane.h"

#ifndef WARP_SIZE
#  define WARP_SIZE 64
#endif
#define DEV static inline
// DEV_SITE declares the last parameter of a collective, `site`: the source line of the call. DEV_AT passes
// `site` to another function. The emulator checks that all lanes of a wave call a collective from the same
// line.
#define DEV_SITE , u32 site = __builtin_LINE()
#define DEV_AT , site

namespace emu {

// Reduces 32-bit values (sum or maximum) over aligned groups of lanes, in the tree order of butterfly
// shuffles.
template <class Op, u32 GROUP, class T> T reduce(T v, u32 site) {
    static_assert(sizeof(T) == 4, "32-bit values only");
    const u32 lane = self->lane;
    u32 bits;
    memcpy(&bits, &v, 4);
    exchange().word[lane] = bits;
    WaveExchange& e = wave_collective(site, [](WaveExchange& all) {
        T values[WARP_SIZE];
        for (u32 i = 0; i < WARP_SIZE; ++i) {
            const u32 word = (u32)all.word[i];
            memcpy(values + i, &word, 4);
        }
        for (u32 width = 1; width < GROUP; width *= 2)
            for (u32 i = 0; i < WARP_SIZE; i += 2 * width) values[i] = Op::of(values[i], values[i + width]);
        for (u32 i = 0; i < WARP_SIZE; ++i) {
            u32 word;
            memcpy(&word, values + i / GROUP * GROUP, 4);
            all.word[i] = word;
        }
    });
    bits = (u32)e.word[lane];
    memcpy(&v, &bits, 4);
    return v;
}

// Matrix product by one wave: C[M][N] += A[M][K] * B[K][N]. `Layout` maps the element indices of a lane to
// rows and columns. Sums are f32, in ascending order of k.
template <class Layout, u32 M, u32 N, u32 K, class T> void tile_product(float* c, const T* a, const T* b, u32 site) {
    if (self->wave->lanes != WARP_SIZE) rule_violated("matrix product by an incomplete wave");
    WaveExchange& mine = exchange();
    for (u32 i = 0; i < Layout::NA; ++i) mine.a[Layout::a_row(i) * K + Layout::a_k(i)] = f32(a[i]);
    for (u32 i = 0; i < Layout::NB; ++i) mine.b[Layout::b_k(i) * N + Layout::b_col(i)] = f32(b[i]);
    for (u32 i = 0; i < Layout::NC; ++i) mine.c[Layout::c_row(i) * N + Layout::c_col(i)] = c[i];
    WaveExchange& e = wave_collective(site, [](WaveExchange& all) {
        for (u32 row = 0; row < M; ++row)
            for (u32 k = 0; k < K; ++k)
                for (u32 col = 0; col < N; ++col) all.c[row * N + col] += all.a[row * K + k] * all.b[k * N + col];
    });
    for (u32 i = 0; i < Layout::NC; ++i) c[i] = e.c[Layout::c_row(i) * N + Layout::c_col(i)];
}

template <u32 ID> struct Index {};

template <class... A, size_t... I> void call(void (*kernel)(A...), void** args, std::index_sequence<I...>) {
    kernel(*(A*)args[I]...);
}
template <class... A> bool launch(void (*kernel)(A...), const Launch& l, u32 max_threads, const char* name) {
    static_assert(sizeof...(A) <= 64, "too many arguments");
    if (l.sizes) {
        u32 count = 0;
        ((l.sizes->bytes[count++] = sizeof(A)), ...);
        l.sizes->count = count;
        l.sizes->max_threads = max_threads;
        l.sizes->wave = WARP_SIZE;
        return true;
    }
    // A kernel function and the addresses of its arguments.
    struct KernelCall { void (*kernel)(A...); void** args; } c{kernel, l.args};
    const auto entry = [](void* p) {
        const KernelCall* c = (const KernelCall*)p;
        call(c->kernel, c->args, std::index_sequence_for<A...>{});
    };
    return run(l, WARP_SIZE, entry, &c, name);
}

template <class T, u32 COUNT, class Site> T (&shared(Site))[COUNT] {
    static const char key = 0;  // The address of `key` identifies the array; `Site` makes one per declaration.
    return *(T(*)[COUNT])shared_array(&key, sizeof(T) * COUNT, alignof(T));
}

}  // namespace emu

// KERNEL defines a kernel and EXPORT its entry point. EXPORT finds max_threads through the value of
// __COUNTER__, so each EXPORT must directly follow its KERNEL.
#define KERNEL(max_threads) \
    static constexpr u32 emu_max_threads(emu::Index<__COUNTER__>) { return max_threads; } \
    static void
#define EXPORT(name)                                                                            \
    extern "C" __attribute__((visibility("default"))) bool emu_kernel_##name(const emu::Launch* l) {                                   \
        return emu::launch(name, *l, emu_max_threads(emu::Index<__COUNTER__ - 1>{}), #name);     \
    }
#define SHARED(T, name, count) auto& name = emu::shared<T, (count)>([] {})
#define DYN_SHARED(T, name) T* name = (T*)emu::self->dynamic

DEV u32 tid() { return emu::self->tid; }
DEV u32 bdim() { return emu::self->bdim; }
DEV u32 lane() { return emu::self->lane; }
DEV u32 warp_id() { return emu::self->tid / WARP_SIZE; }
DEV u32 bid_x() { return emu::self->bid->x; }
DEV u32 bid_y() { return emu::self->bid->y; }
DEV u32 bid_z() { return emu::self->bid->z; }
DEV u32 gdim_x() { return emu::self->grid->x; }
DEV u32 gdim_y() { return emu::self->grid->y; }
DEV u32 gdim_z() { return emu::self->grid->z; }

DEV void sync() { emu::block_sync(); }
DEV void wait_shared() {}
DEV void warp_sync(u32 site = __builtin_LINE()) { emu::wave_collective(site, nullptr); }
DEV u32 shfl_u32(u32 v, u32 from DEV_SITE) {
    emu::exchange().word[lane()] = v;
    return (u32)emu::wave_collective(site, nullptr).word[from % WARP_SIZE];
}
DEV u64 warp_ballot(bool p DEV_SITE) {
    emu::exchange().word[lane()] = p;
    const emu::WaveExchange& e = emu::wave_collective(site, nullptr);
    u64 mask = 0;
    for (u32 i = 0; i < emu::self->wave->lanes; ++i) mask |= (e.word[i] & 1) << i;
    return mask;
}

DEV float as_f32(u32 v) { float f; memcpy(&f, &v, 4); return f; }
DEV u32 as_u32(float f) { u32 v; memcpy(&v, &f, 4); return v; }
DEV float exp2_(float x) { return exp2f(x); }
DEV float log2_(float x) { return log2f(x); }
DEV float sqrt_(float x) { return sqrtf(x); }
DEV float rsqrt_(float x) { return 1.f / sqrtf(x); }
DEV float rcp_(float x) { return 1.f / x; }
DEV float fma_(float a, float b, float c) { return fmaf(a, b, c); }
DEV float fmax_(float a, float b) { return fmaxf(a, b); }
DEV float fmin_(float a, float b) { return fminf(a, b); }
DEV float fabs_(float a) { return fabsf(a); }
// Converts f16 bits to f32: shifts exponent and mantissa into place, then corrects the exponent bias by a
// multiplication, which is exact.
DEV float f16_value(u16 bits) {
    const u32 sign = (u32)(bits & 0x8000) << 16, size = bits & 0x7fff;
    if (size >= 0x7c00) return as_f32(sign | 0x7f800000u | (size & 0x3ff) << 13);
    return as_f32(sign | as_u32(as_f32(size << 13) * as_f32((127u + 112u) << 23)));
}
DEV u16 f16_bits(float x) {
    const u32 sign = as_u32(x) >> 16 & 0x8000, a = as_u32(x) & 0x7fffffffu;
    if (a > 0x7f800000u) return (u16)(sign | 0x7e00);
    if (a >= 0x477ff000u) return (u16)(sign | 0x7c00);
    // Subnormal f16 values are multiples of 2^-24. After multiplication by 2^24, the addition of 1.5 * 2^23
    // rounds the value to an integer, which is in the low mantissa bits of the sum.
    if (a < 0x38800000u) return (u16)(sign | (as_u32(as_f32(a) * 16777216.0f + 12582912.0f) & 0xffffu));
    return (u16)(sign | ((a + 0xfffu + (a >> 13 & 1)) >> 13) - (112u << 10));
}
DEV u16 bf16_bits(float f) {
    const u32 u = as_u32(f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (u16)(u >> 16 | 64);
    return (u16)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

DEV u32 atomic_add(u32* p, u32 v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
DEV u32 atomic_cas(u32* p, u32 expected, u32 wanted) {
    __atomic_compare_exchange_n(p, &expected, wanted, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return expected;
}
DEV u32 atomic_max(u32* p, u32 v) {
    u32 old = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (old < v && !__atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    return old;
}
DEV float atomic_add(float* p, float v) {
    u32 old = __atomic_load_n((u32*)p, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n((u32*)p, &old, as_u32(as_f32(old) + v), false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    return as_f32(old);
}
DEV u32 atomic_add_acq_rel(u32* p, u32 v) { return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL); }
DEV u32 load_acquire(const u32* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
DEV void store_release(u32* p, u32 v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
DEV void fence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
DEV void pause() { emu::pause(); }

template <class V> DEV V load_const(const V* p) { return *p; }
template <class V> DEV V load_stream(const V* p) { return *p; }
template <class V> DEV void store_stream(V* p, const V& v) { *p = v; }
DEV void cp_async4(void* shared, const void* global) {
    if (((u64)shared | (u64)global) % 4 != 0) emu::rule_violated("a copy of four bytes is not aligned to them");
    memcpy(shared, global, 4);
}
DEV void cp_async16(void* shared, const void* global) {
    if (((u64)shared | (u64)global) % 16 != 0) emu::rule_violated("a 16-byte copy is not aligned to 16 bytes");
    memcpy(shared, global, 16);
}
DEV void cp_async16_zfill(void* shared, const void* global, bool present) {
    if (((u64)shared | (u64)global) % 16 != 0) emu::rule_violated("a 16-byte copy is not aligned to 16 bytes");
    if (present) memcpy(shared, global, 16); else memset(shared, 0, 16);
}
DEV void cp_async_commit() {}
template <u32 N> DEV void cp_async_wait() {}
DEV void grid_wait() {}
DEV void grid_launch_dependents() {}
