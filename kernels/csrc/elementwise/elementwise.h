// elementwise.h - SwiGLU arithmetic for kernels that fuse it, and the loop over the columns of elementwise kernels.
#pragma once

// x * sigmoid(x), f32.
DEV float silu(float x) { return x * rcp_(1.f + exp2_(-1.44269504f * x)); }

DEV f32x8 silu_mul(const f32x8& gate, const f32x8& up) {
    f32x8 r;
    for (u32 i = 0; i < 8; ++i) r.v[i] = silu(gate.v[i]) * up.v[i];
    return r;
}

// Calls wide(c) for each group of 8 columns, from column c on, that this thread processes; if `aligned` is
// false, calls narrow(c) for each single column instead. A row is divided among `parts` blocks.
template <class Wide, class Narrow> DEV void each_column(u32 cols, u32 parts, bool aligned, Wide wide, Narrow narrow) {
    const u32 first = bid_x() % parts * bdim() + tid(), step = parts * bdim();
    if (aligned && cols % 8 == 0) {
        for (u32 c = first * 8; c < cols; c += step * 8) wide(c);
    } else {
        for (u32 c = first; c < cols; c += step) narrow(c);
    }
}
