// norm/row.h - RMS norm of a row by one block. Between the sum of squares and the store, each thread keeps
// PIECES groups of 8 columns of the row in registers. Used by the norm kernels, and by the all-reduce kernel,
// which computes the value that is added to the row instead of reading it from memory.
#pragma once

// Source of the values that norm_in_registers() adds to x: a row in memory.
struct AddendRow {
    const ACT* row;
    u32 cols;
};
template <u32 PIECES> DEV void fill(f32x8 (&d)[PIECES], const AddendRow& from) {
    for (u32 p = 0; p < PIECES; ++p) {
        const u32 c = (p * bdim() + tid()) * 8;
        if (c < from.cols) d[p] = load8(from.row + c);
    }
}

// Normalises a row: every thread calls put(first column, eight normalised values) for each of its PIECES
// groups of 8 columns; groups beyond the last column have undefined values. With ADD, the values that
// fill(f32x8[PIECES], addends) returns are first added to x, and the sum is stored to x.
template <u32 PIECES, bool ADD, class Addends, class Put>
DEV void norm_in_registers(ACT* x, const NORM_WEIGHT* w, u32 cols, float eps, const Addends& addends, const Put& put) {
    f32x8 v[PIECES], weight[PIECES];
    for (u32 p = 0; p < PIECES; ++p) {
        const u32 c = (p * bdim() + tid()) * 8;
        if (c < cols) weight[p] = load8(w + c);
    }
    grid_launch_dependents();
    grid_wait();
    float squares = 0.f;
    for (u32 p = 0; p < PIECES; ++p) {
        const u32 c = (p * bdim() + tid()) * 8;
        if (c < cols) v[p] = load8(x + c);
    }
    if constexpr (ADD) {
        f32x8 d[PIECES];
        fill(d, addends);
        for (u32 p = 0; p < PIECES; ++p) {
            const u32 c = (p * bdim() + tid()) * 8;
            if (c >= cols) continue;
            for (u32 i = 0; i < 8; ++i) v[p].v[i] = residual_sum(v[p].v[i], d[p].v[i]);
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
