// norm/row.h - RMS norm of a row by a block: threads keep it in registers, PIECES groups of 8 columns each,
// between the sum of squares and the store. Used by the norm kernels, and by kernels whose addend is not in
// memory.
#pragma once

// Addends of norm_in_registers() that are a row in memory.
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

// Normalises a row: calls put(first column, eight normalised values) for each piece, on every lane; values
// after the last column are undefined. With ADD the addends are first added to x, in memory too;
// fill(f32x8[PIECES], addends) supplies them for pieces that begin inside the row.
template <u32 PIECES, bool ADD, class Addends, class Put>
DEV void norm_in_registers(ACT* x, const ACT* w, u32 cols, float eps, const Addends& addends, const Put& put) {
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
