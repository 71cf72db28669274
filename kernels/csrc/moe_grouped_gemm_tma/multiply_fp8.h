// moe_grouped_gemm_tma/multiply_fp8.h - products of a pipeline stage with fp8 weights. Weights are converted
// exactly to half_t in registers; the sum over 128 columns (K) is multiplied by its scale in f32.
#pragma once

// Weights of 64 columns (K) of the strip (16 rows of W) of a warp, as the register operands A of four WGMMAs
// of 16 columns each. A lane has lines lane / 4 and lane / 4 + 8 of the strip.
struct WidenedStrip { u32 a[4][4]; };
DEV WidenedStrip widen_strip(const u8* strip, u32 upper) {
    const u32 line = lane() / 4, at = line * COLUMN_BYTES + piece_at(line, lane(), upper);
    const u32x4 low = *(const u32x4*)(strip + at), high = *(const u32x4*)(strip + at + 8 * COLUMN_BYTES);
    WidenedStrip w;
    UNROLL for (u32 i = 0; i < 4; ++i) {
        w.a[i][0] = widen_uppers(low.v[i]), w.a[i][1] = widen_uppers(high.v[i]);
        w.a[i][2] = widen_lowers(low.v[i]), w.a[i][3] = widen_lowers(high.v[i]);
    }
    return w;
}

// Starts the WGMMAs of a strip of weights with the rows of x over 64 columns (K). The result is stored in
// `part`, or added to `part` if `add` is true. `panel`: panel of x in shared memory with these columns.
DEV void multiply_wide(float (&part)[ROWS / 2], const WidenedStrip& w, KMajorOperand panel, bool add) {
    wgmma_fence();
    UNROLL for (u32 i = 0; i < 4; ++i) wgmma<ROWS>(part, w.a[i], advanced(panel, i * 32), add || i > 0);
}

enum : u32 { PARTS = GROUP_LINES / 64 };

DEV void add_scaled(float (&sums)[ROWS / 2], const float (&part)[ROWS / 2], const float* by) {
    UNROLL for (u32 i = 0; i < ROWS / 2; ++i) sums[i] = fma_(part[i], by[i / 2 % 2], sums[i]);
}

#if TILE_ROWS <= 32
// Adds the products of one pipeline stage; version for few rows of x. With few rows, waiting for WGMMAs takes
// longer than the WGMMAs themselves, so all WGMMAs are issued before a single wait.
DEV void multiply_stage(PassAccumulators& sums, const u8* stage, const float* scales) {
    const KMajorOperand x = warp_uniform(by_k(stage + WEIGHT_BYTES));
    float part[PARTS][ROWS / 2];
    WidenedStrip wide[2][PARTS];
    UNROLL for (u32 upper = 0; upper < 2; ++upper)
        UNROLL for (u32 t = 0; t < PARTS; ++t) {
            wide[upper][t] = widen_strip(stage + strip_of_sums(t) * STRIP_BYTES, upper);
            multiply_wide(part[t], wide[upper][t], advanced(x, upper * PANEL_BYTES), upper);
        }
    wgmma_commit();
    wgmma_wait<0>();
    UNROLL for (u32 t = 0; t < PARTS; ++t) {
        wgmma_fence_operand(part[t]);
        add_scaled(sums.c[t], part[t], scales + strip_of_sums(t) * 2);
    }
}
#else
// Adds the products of one pipeline stage. The next weights are converted while WGMMAs run.
DEV void multiply_stage(PassAccumulators& sums, const u8* stage, const float* scales) {
    const KMajorOperand x = warp_uniform(by_k(stage + WEIGHT_BYTES));
    WidenedStrip lower = widen_strip(stage + strip_of_sums(0) * STRIP_BYTES, 0);
    UNROLL for (u32 t = 0; t < PARTS; ++t) {
        float part[ROWS / 2];
        multiply_wide(part, lower, x, false);
        const WidenedStrip upper = widen_strip(stage + strip_of_sums(t) * STRIP_BYTES, 1);
        multiply_wide(part, upper, advanced(x, PANEL_BYTES), true);
        wgmma_commit();
        if (t + 1 < PARTS) lower = widen_strip(stage + strip_of_sums(t + 1) * STRIP_BYTES, 0);
        wgmma_wait<0>();
        wgmma_fence_operand(part);
        add_scaled(sums.c[t], part, scales + strip_of_sums(t) * 2);
    }
}
#endif
