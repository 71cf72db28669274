// dev/vector.h - the activation type, small vectors, and 8-wide loads and stores in f32.
#pragma once

#include "dev/half.h"

struct alignas(8) f32x2 { float v[2]; };
struct alignas(16) f32x4 { float v[4]; };
struct alignas(16) u32x4 { u32 v[4]; };
struct f32x8 { float v[8]; };  // unaligned, because it is used in registers only

// Type of activations: float with -DACT_F32=1, otherwise half_t.
#if ACT_F32
typedef float ACT;
typedef f32x4 ACTV;
#else
typedef half_t ACT;
typedef half_x8 ACTV;
#endif
// Number of activations per 16-byte load.
enum : u32 { ACT_WIDTH = 16 / sizeof(ACT) };

// Reinterprets bytes as another type of the same size.
template <class To, class From> DEV To bits_as(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "sizes differ");
    return __builtin_bit_cast(To, from);
}

DEV float f32(float x) { return x; }

// Conversion of an f32 value x, rounded to nearest even: to<half_t>(x), to<float>(x), to<fp8>(x), to<ACT>(x).
template <class T> struct RoundTo;
template <> struct RoundTo<float> { DEV float of(float x) { return x; } };
template <> struct RoundTo<half_t> { DEV half_t of(float x) { return to_half(x); } };
template <class T> DEV T to(float x) { return RoundTo<T>::of(x); }

DEV f32x8 widen(const half_x8& x) {
    const u32x4 w = bits_as<u32x4>(x);
    f32x8 r;
    for (u32 i = 0; i < 4; ++i) {
        r.v[2 * i] = low_half(w.v[i]);
        r.v[2 * i + 1] = high_half(w.v[i]);
    }
    return r;
}
DEV half_x8 narrow(const f32x8& x) {
    u32x4 w;
    for (u32 i = 0; i < 4; ++i) w.v[i] = pack_half(x.v[2 * i], x.v[2 * i + 1]);
    return bits_as<half_x8>(w);
}

// Loads eight values from p as f32. p is aligned to 16 bytes (8 for fp8).
DEV f32x8 load8(const half_t* p) { return widen(*(const half_x8*)p); }
DEV f32x8 load8(const float* p) {
    const f32x4 a = ((const f32x4*)p)[0], b = ((const f32x4*)p)[1];
    return f32x8{{a.v[0], a.v[1], a.v[2], a.v[3], b.v[0], b.v[1], b.v[2], b.v[3]}};
}
// Loads eight values as f32 by load_stream(): for data that is read once and that no running kernel writes.
DEV f32x8 load8_stream(const half_t* p) { return widen(load_stream((const half_x8*)p)); }
DEV f32x8 load8_stream(const float* p) {
    const f32x4 a = load_stream((const f32x4*)p), b = load_stream((const f32x4*)p + 1);
    return f32x8{{a.v[0], a.v[1], a.v[2], a.v[3], b.v[0], b.v[1], b.v[2], b.v[3]}};
}
DEV void store8(half_t* p, const f32x8& x) { *(half_x8*)p = narrow(x); }
DEV void store8(float* p, const f32x8& x) {
    ((f32x4*)p)[0] = f32x4{{x.v[0], x.v[1], x.v[2], x.v[3]}};
    ((f32x4*)p)[1] = f32x4{{x.v[4], x.v[5], x.v[6], x.v[7]}};
}
