// fp8_gemm: y [M, N] = x [M, K] W [N, K]^T + bias for any M, x and W in fp8 with scales, on tensor cores
// (matrix cores): fallback where the vendor BLAS does not support the GEMM. CPU reference: `Linear` on
// dequantised x and W.
//
// A block computes 64 x 64 outputs (tile.h).
//
//   x_scales  f32 scales of x, one per row and 128 k: [K / 128, x_scale_stride >= M]; with CHANNELS one per
//             row: [M]
//   w_scales  f32 scales of W, one per `unit` outputs and 128 k, with row stride scale_stride; with CHANNELS
//             one per output: [N]
//   -DOUT_F32=1 (y is float)  -DCHANNELS=1 (scales per row of x and per output, not per block)
// Grid: (N / 64, M / 64), rounded up. Block: 256. K a multiple of 16, rows of x and W aligned to 16 bytes.
// Rounding: the sum plus bias once to the type of y. Roofline: 2 M N K operations.
#include "dev.h"
#include "fp8_gemm/tile.h"

#if OUT_F32
typedef float OUT;
#else
typedef half_t OUT;
#endif

KERNEL(256) fp8_gemm(OUT* y, const fp8* x, const float* x_scales, const fp8* w, const float* w_scales, const float* bias,
                     u32 m, u32 n, u32 k, u32 y_stride, u32 x_scale_stride, u32 unit, u32 scale_stride) {
    grid_launch_dependents();
    grid_wait();
    const u32 first = bid_y() * TILE;
    const ScaledFp8Weights weights{w, w_scales, bid_x() * OUTPUTS, n, k, unit, scale_stride};
    const auto x_row = [&](u32 r) -> const fp8* { return first + r < m ? x + (u64)(first + r) * k : nullptr; };
#if WARP_SIZE == 64
    // Rows that do not exist are zeros and have the scale of the last row.
    const auto x_scale = [&](u32, u32 r, u32 block) {
        const u32 row = first + r < m ? first + r : m - 1;
        return scale_at(x_scales + (u64)block * x_scale_stride, row * (u32)sizeof(float));
    };
#else
    const auto x_scale = [&](u32, u32 r, u32 block) {
        return first + r < m ? x_scales[(u64)block * x_scale_stride + first + r] : 1.f;
    };
#endif
    const TileAccumulators sums = tile_product(weights, x_row, x_scale);
    each_output(weights, sums, [&](u32 r, u32 out, float sum, float) {
        const u32 row = first + r;
        if (row >= m || out >= n) return;
        if (CHANNELS) sum *= x_scales[row] * w_scales[out];
        if (bias) sum += bias[out];
        y[(u64)row * y_stride + out] = to<OUT>(sum);
    });
}
EXPORT(fp8_gemm)
