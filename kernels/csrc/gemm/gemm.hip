// gemm: y [M, N] = x [M, K] W [N, K]^T + bias for any M, in half_t on tensor cores (matrix cores): fallback
// where no vendor BLAS is available. CPU reference: `Linear`, followed by `GatedActivation` with GATED.
//
//   -DOUT_F32=1  y is float
//   -DGATED=1  y [M, N / 2] = gated(gate, up), where the first half of W's rows gives gate and the second up
//   -DTILE_M=128|64
// Grid: (N / OUTPUTS, M / TILE_M), rounded up. Block: 256. K is a multiple of 8, rows of x and W are aligned
// to 16 bytes.
// Dynamic shared memory: STAGES * (TILE_M + 128) rows; 3 stages of rows of 80 bytes with warps of 32 lanes, 1 stage of
// rows of 64 bytes with 64.
//
// Rounding: the sum plus bias once to the type of y; GATED as in gemm_small_m. Roofline: 2 M N K operations.
#include "dev.h"
#include "gemm/tile.h"

#if OUT_F32
typedef float OUT;
#else
typedef half_t OUT;
#endif

KERNEL(256) gemm(OUT* y, const half_t* x, const half_t* w, const float* bias, u32 m, u32 n, u32 k, u32 y_stride,
                 u32 x_stride) {
    DYN_SHARED(half_t, stages);
    grid_wait();
    const u32 first = bid_x() * OUTPUTS, row = bid_y() * TILE_M, outputs = GATED ? n / 2 : n;
    const auto x_row = [&](u32 r) { return row + r < m ? x + (u64)(row + r) * x_stride : nullptr; };
    const TileAccumulators t = tile_product(stages, x_row, w, first, n, k);
    each_output(t, [&](u32 r, u32 c, float value, float up) {
        const u32 out = first + c;
        if (row + r >= m || out >= outputs) return;
        if (bias) value += bias[out];
        if (GATED) value = gated(value, up + (bias ? bias[outputs + out] : 0.f));
        y[(u64)(row + r) * y_stride + out] = to<OUT>(value);
    });
}
EXPORT(gemm)
