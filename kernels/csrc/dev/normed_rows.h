// dev/normed_rows.h - copies of a row of x to shared memory by one warp, with or without an RMS norm. Each row is processed
// by one warp for any number of rows, so that the order of additions in the sum of squares does not depend on it.
//
// Rounding: x / rms is rounded to half_t, and so is its product with the norm weight.
#pragma once
#include "dev/register_copy.h"

// Vectors of 8 columns that each lane reads of a row of `cols` columns, and the first column of vector i of this lane.
DEV u32 lane_vectors(u32 cols) { return (cols + WARP_SIZE * 8 - 1) / (WARP_SIZE * 8); }
DEV u32 vector_column(u32 i) { return (i * WARP_SIZE + lane()) * 8; }

// Loads the vector at column `at` of a row of k columns. Without a branch: beyond the last column, the first vector is loaded.
DEV u32x4 load_columns(const half_t* row, u32 at, u32 k) { return load_piece(row + (at < k ? at : 0)); }

// Returns the values of a loaded vector, or zeros if `present` is false.
DEV f32x8 loaded_values(const u32x4& loaded, bool present) {
    u32x4 v = pinned(loaded);
    UNROLL for (u32 e = 0; e < 4; ++e) v.v[e] = present ? v.v[e] : 0;
    return widen(bits_as<half_x8>(v));
}

// Returns 1 / sqrt(mean of squares + eps) of a row of x of k columns, in every lane.
DEV float row_inverse_rms(const half_t* row, u32 k, float eps) {
    float squares = 0.f;
    each_ahead<8>(
        lane_vectors(k), [&](u32 i) { return load_columns(row, vector_column(i), k); },
        [&](u32 i, const u32x4& loaded) {
            const f32x8 v = loaded_values(loaded, vector_column(i) < k);
            for (u32 e = 0; e < 8; ++e) squares = fma_(v.v[e], v.v[e], squares);
        });
    return rsqrt_(warp_sum(squares) / (float)k + eps);
}

// A loaded vector of x and the norm weights of the same columns.
struct NormedVector { u32x4 x, weight; };

// Copies a row of x of k columns to shared memory, multiplied by `scale` and the norm weights; columns from k to `end` become
// zero.
DEV void copy_normed_row(half_t* to, const half_t* row, const half_t* norm, u32 k, u32 end, float scale) {
    each_ahead<4>(
        lane_vectors(end),
        [&](u32 i) {
            const u32 at = vector_column(i);
            return NormedVector{load_columns(row, at, k), load_columns(norm, at, k)};
        },
        [&](u32 i, const NormedVector& loaded) {
            const u32 at = vector_column(i);
            f32x8 v = loaded_values(loaded.x, at < k);
            const f32x8 w = loaded_values(loaded.weight, at < k);
            for (u32 e = 0; e < 8; ++e) v.v[e] = w.v[e] * f32(to_half(v.v[e] * scale));
            if (at < end) store8(to + at, v);
        });
}

// Copies a row of x of k columns to shared memory; columns from k to `end` become zero.
DEV void copy_row(half_t* to, const half_t* row, u32 k, u32 end) {
    each_ahead<8>(
        lane_vectors(end), [&](u32 i) { return load_columns(row, vector_column(i), k); },
        [&](u32 i, const u32x4& loaded) {
            const u32 at = vector_column(i);
            if (at < end) store_loaded(to + at, loaded, at < k);
        });
}
