// dev/vector4.h - 4-wide loads and stores in f32, aligned to four values.
#pragma once
#include "dev/vector.h"

DEV f32x4 load4(const float* p) { return *(const f32x4*)p; }
DEV f32x4 load4(const half_t* p) {
    const half_x4 x = *(const half_x4*)p;
    return {{f32(x.v[0]), f32(x.v[1]), f32(x.v[2]), f32(x.v[3])}};
}
DEV void store4(float* p, const f32x4& x) { *(f32x4*)p = x; }
DEV void store4(half_t* p, const f32x4& x) {
    *(half_x4*)p = {{to_half(x.v[0]), to_half(x.v[1]), to_half(x.v[2]), to_half(x.v[3])}};
}
