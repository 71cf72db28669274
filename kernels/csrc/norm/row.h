// norm/row.h - a row that a block norms: its threads keep it in registers, PIECES eights each, between the sum of
// squares and the store. For the norm kernels, and for those whose addend comes from elsewhere than memory.
#pragma once

// Calls put(first column, eight normalised values) for each piece, on every lane: behind the last column, of no
// meaning. With ADD, x += addend(first column) of each piece before.
template <u32 PIECES, bool ADD, class Addend, class Put>
DEV void norm_in_registers(ACT* x, const ACT* w, u32 cols, float eps, const Addend& addend, const Put& put) {
    f32x8 v[PIECES], weight[PIECES];
    for (u32 p = 0; p < PIECES; ++p) {
        const u32 c = (p * bdim() + tid()) * 8;
        if (c < cols) weight[p] = load8(w + c);
    }
    grid_release();
    grid_wait();
    float squares = 0.f;
    for (u32 p = 0; p < PIECES; ++p) {
        const u32 c = (p * bdim() + tid()) * 8;
        if (c >= cols) continue;
        v[p] = load8(x + c);
        if constexpr (ADD) {
            const f32x8 d = addend(c);
            for (u32 i = 0; i < 8; ++i) v[p].v[i] = residual_sum(v[p].v[i], d.v[i]);
            store8(x + c, v[p]);
        }
    }
    for (u32 p = 0; p < PIECES; ++p) {
        if ((p * bdim() + tid()) * 8 >= cols) continue;
        for (u32 i = 0; i < 8; ++i) squares += v[p].v[i] * v[p].v[i];
    }
    const float scale = inverse_rms(block_sum(squares), cols, eps);
    for (u32 p = 0; p < PIECES; ++p) {
        const u32 c = (p * bdim() + tid()) * 8;
        for (u32 i = 0; i < 8; ++i) v[p].v[i] = normed(v[p].v[i], scale, weight[p].v[i]);
        put(c, v[p]);
    }
}
