// elementwise.h - SwiGLU arithmetic, for the elementwise kernel and for kernels that fuse it.
#pragma once

// x * sigmoid(x), f32.
DEV float silu(float x) { return x * rcp_(1.f + exp2_(-1.44269504f * x)); }

DEV f32x8 silu_mul(const f32x8& gate, const f32x8& up) {
    f32x8 r;
    for (u32 i = 0; i < 8; ++i) r.v[i] = silu(gate.v[i]) * up.v[i];
    return r;
}
